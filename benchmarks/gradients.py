"""How much of reducing gradients and gathering parameters a step hides: `python benchmarks/gradients.py [rounds]`.

Four processes, PP2 x DP2, 1f1b, 4 micro-batches, ten dense layers of a million bf16 parameters a stage, each process in
a network namespace of its own with 200 Mbit/s out of it (a token bucket). Computation takes its time without using the
CPU (paced lanes); everything that moves is real. A sharded optimizer has a bucket for each layer. In each round run,
one after the other:

    alone       a step that reduces nothing (`no_sync`)
    at the end  a step of a pipeline without that optimizer: one all-reduce of a stage's gradients, after its backward
    by bucket   a step that gathers parameters and reduce-scatters gradients, bucket by bucket, after an update

    hidden               1 - (by bucket - alone) / (at the end - alone)
    bytes_per_parameter  of all tensors that a rank has after a step by bucket, the most of any rank: 2 of a parameter,
                         4 of its main gradient, and half of 12, as two replicas share moments and master
    step_over_predicted  by bucket over its simulation, less 1; what a bucket takes on the link is from a step before

The last line is JSON, medians over rounds. Needs root for the namespaces; without, the numbers are null.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from shaped_link import ShapedLink, why_not
from treadle.ir.ops import OpKind
from treadle.ir.trace import MICROSECONDS
from treadle.models.views import NamedView
from treadle.runtime.model.segments import Segment, compute, reference_forward
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

PP, DP, MICROBATCHES, LAYERS = 2, 2, 4, 10
WIDTH, TOKENS = 1024, 4
RATE, PORT = "200mbit", 29417
MILLISECOND = 1_000_000
TIMES = {"attn_f": 20, "mlp_f": 20, "mlp_b": 30, "attn_b": 30, "mlp_w": 20, "attn_w": 20}
"""What the parts of a layer take, milliseconds."""


class Layer(nn.Module):
    """A layer without an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.linear = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def segments(self) -> list[Segment]:
        """Attention's place, and the MLP."""
        return [
            compute("attn", lambda x: x + self.mix(x), reads="x", writes="h"),
            compute("mlp", lambda h: h + torch.tanh(self.linear(h)), reads="h", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        out: Tensor = reference_forward(self, x)["x"]
        return out


def step_costs() -> treadle.Costs:
    """What paced lanes take; what moves takes what it takes."""
    costs = treadle.load_costs("unit")
    parts = {name: ms * MILLISECOND for name, ms in TIMES.items()}
    message = dict.fromkeys(("send", "reduce_grad", "reduce_scatter"), 0)
    return replace(costs, name="paced", clock=MICROSECONDS, layer=parts, message=message, ends={}, step={})


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """In float32."""
    return nn.functional.mse_loss(output.float(), target.float())


def pipeline(rank: int, given: Namespace) -> treadle.Pipeline:
    """One stage; the same parameters each time."""
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(rank // DP)
    stage = nn.Sequential(*(Layer() for _ in range(LAYERS))).bfloat16()
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MICROBATCHES)
    return treadle.Pipeline(
        {0: stage},
        schedule,
        mesh=mesh,
        loss_fn=loss_fn,
        lanes="paced",
        costs=step_costs(),
        address=given.address,
        deadline_s=120,
    )


def tensor_bytes() -> int:
    """The memory of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def predicted_s(pipe: treadle.Pipeline, seen: treadle.Trace) -> float:
    """The simulated step, with the times that a bucket took on the link in another."""

    def median(kind: OpKind) -> int:
        chosen = np.flatnonzero(seen.program.kind == kind)
        return round(float(np.median((seen.end - seen.start)[chosen])))

    costs = step_costs()
    message = {**costs.message, "reduce_scatter": median(OpKind.REDUCE_SCATTER)}
    costs = replace(costs, message=message, step={"gather_params": median(OpKind.GATHER_PARAMS)})
    return treadle.simulate(pipe.program, costs).makespan / 1e9


def seconds(pipe: treadle.Pipeline, x: Tensor) -> tuple[float, treadle.Trace]:
    """A step's time on the clock of all ranks."""
    dist.barrier()
    pipe.step(x, x)
    trace = pipe.gather_trace()
    return trace.makespan / 1e9, trace


def rank_main(rank: int, given: Namespace) -> None:
    """What each process does; rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore(given.master, PORT, PP * DP, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PP * DP, timeout=timedelta(seconds=120))
    torch.manual_seed(rank)
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH, dtype=torch.bfloat16)
    before = tensor_bytes()
    pipe = pipeline(rank, given)
    named = [(f"{rank // DP}.{name}", param) for name, param in pipe.modules[rank // DP].named_parameters()]
    config = OptimizerConfig(bucket_mb=WIDTH * WIDTH * 2 / 2**20)
    optimizer = ShardedOptimizer(pipe, [NamedView(name, param) for name, param in named], config)

    def by_bucket() -> tuple[float, treadle.Trace]:
        took = seconds(pipe, x)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        return took

    by_bucket()
    held = (tensor_bytes() - before) / sum(param.numel() for _, param in named)
    plain = pipeline(rank, given)
    params = list(plain.modules[rank // DP].parameters())

    def whole(*, reduces: bool) -> float:
        for param in params:
            param.grad = None
        if reduces:
            return seconds(plain, x)[0]
        with plain.no_sync():
            return seconds(plain, x)[0]

    whole(reduces=True), whole(reduces=False)
    seen = by_bucket()[1]
    predicted, hidden, over = predicted_s(pipe, seen), list[float](), list[float]()
    for _ in range(given.rounds):
        alone, at_end, bucketed = whole(reduces=False), whole(reduces=True), by_bucket()[0]
        hidden.append(1 - (bucketed - alone) / (at_end - alone))
        over.append(bucketed / predicted - 1)
        if rank == 0:
            print(
                f"alone {alone:.3f} s, at the end {at_end:.3f} s, by bucket {bucketed:.3f} s "
                f"({predicted:.3f} predicted): {hidden[-1]:.1%} hidden",
                flush=True,
            )
    most = torch.tensor([held], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        told = {"hidden": statistics.median(hidden), "bytes_per_parameter": float(most)}
        told["step_over_predicted"] = statistics.median(over)
        print(json.dumps({name: round(value, 4) for name, value in told.items()}), flush=True)
    for each in (pipe, plain):
        each.close()
    dist.destroy_process_group()


def main() -> None:
    """Makes the links and starts the processes."""
    parser = ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    for name in ("--rank", "--master", "--address"):
        parser.add_argument(name)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(int(given.rank), given)
        return
    reason = why_not()
    if reason is not None:
        print(f"no shaped link here: {reason}")
        print(json.dumps(dict.fromkeys(("hidden", "bytes_per_parameter", "step_over_predicted"))))
        return
    with ShapedLink(RATE, PP * DP) as link:
        ranks = [start(rank, given, link) for rank in range(PP * DP)]
        try:
            codes = [process.wait(900) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(codes):
        sys.exit(f"ranks exited with {codes}")


def start(rank: int, given: Namespace, link: ShapedLink) -> subprocess.Popen[bytes]:
    """A process in a namespace of its own."""
    own = [sys.executable, __file__, str(given.rounds), "--rank", str(rank), "--master", link.address(0)]
    own += ["--address", link.address(rank)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": link.interface(rank), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(link.command(rank, own), env=env)


if __name__ == "__main__":
    main()
