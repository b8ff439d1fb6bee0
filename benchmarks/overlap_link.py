"""How much of an all-to-all a slow link can hide: `python benchmarks/overlap_link.py [rounds] [--traces DIR]`.

Two processes in network namespaces of their own, joined by a link of 200 Mbit/s each way (a token bucket), EP2: one
stage of one MoE layer, 32 micro-batches, interleaved-overlap. Computation is real and takes about as long as the
all-to-alls do. In each round the same Program runs once with its lanes side by side (thread) and once one op after the
other (serial).

    hidden    (serial step - overlapped step) / time of the all-to-alls in the serial step

The last line is JSON, medians over rounds; `--traces` keeps the round of the median. Needs root for the namespaces;
without, `hidden` is null and it says why.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from shaped_link import ShapedLink, why_not
from treadle.ir.ops import LaneKind
from treadle.moe import MoELayer
from treadle.simulator.fitting import fit

EP, MICROBATCHES, LAYERS = 2, 32, 1
WIDTH, HIDDEN, EXPERTS, TOKENS = 256, 1440, 4, 768
RATE = "200mbit"
PORT = 29411


def mixer() -> nn.Module:
    """In place of attention, something that takes about as long as the experts do."""
    return nn.Sequential(nn.Linear(WIDTH, 3 * HIDDEN), nn.GELU(), nn.Linear(3 * HIDDEN, WIDTH))


def pipeline(rank: int, lanes: str, address: str, costs: treadle.Costs) -> treadle.Pipeline:
    """One stage; the same parameters each time."""
    mesh = init_device_mesh("cpu", (1, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate("interleaved-overlap", pp=1, vpp=1, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    layers = [MoELayer(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=rank, mixer=mixer()) for _ in range(LAYERS)]
    loss_fn = nn.functional.mse_loss
    return treadle.Pipeline(
        {0: nn.Sequential(*layers)},
        schedule,
        mesh=mesh,
        loss_fn=loss_fn,
        lanes=lanes,  # type: ignore[arg-type]
        costs=costs,
        address=address,
        deadline_s=120,
    )


def seconds_of(trace: treadle.Trace, kind: LaneKind) -> float:
    """What the ops of a kind of lane took on a rank, in the mean."""
    program = trace.program
    chosen = program.lane_kind[program.lane_of] == kind
    return float((trace.end - trace.start)[chosen].sum()) / 1e9 / program.num_ranks


def one_step(pipe: treadle.Pipeline, x: torch.Tensor) -> treadle.Trace:
    dist.barrier()
    pipe.step(x, x)
    return pipe.gather_trace()


def rank_main(rank: int, given: Namespace) -> None:
    """What each process does; rank 0 tells."""
    torch.set_num_threads(1)
    store = dist.TCPStore(given.master, PORT, EP, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=EP, timeout=timedelta(seconds=120))
    torch.manual_seed(rank)
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    probe = pipeline(rank, "serial", given.address, treadle.load_costs("deepseek-v3-h800"))
    for _ in range(2):
        seen = one_step(probe, x)
    costs = fit(seen)  # as this machine and this link have them
    probe.close()
    pipes = {name: pipeline(rank, name, given.address, costs) for name in ("thread", "serial")}
    for pipe in pipes.values():
        one_step(pipe, x)
    hidden: list[float] = []
    kept: list[treadle.Trace] = []
    predicted_s = treadle.simulate(pipes["thread"].program, costs).makespan / 1e9
    for _ in range(given.rounds):
        serial, woven = one_step(pipes["serial"], x), one_step(pipes["thread"], x)
        moved_s, computed_s = seconds_of(serial, LaneKind.EP), seconds_of(serial, LaneKind.COMPUTE)
        serial_s, woven_s = serial.makespan / 1e9, woven.makespan / 1e9
        hidden.append((serial_s - woven_s) / moved_s)
        kept.append(woven)
        if rank == 0:
            print(
                f"one after the other {serial_s:.3f} s (compute {computed_s:.3f}, all-to-all {moved_s:.3f}), "
                f"side by side {woven_s:.3f} s ({predicted_s:.3f} predicted): {hidden[-1]:.1%} hidden",
                flush=True,
            )
    if rank == 0 and given.traces is not None:
        woven = kept[hidden.index(statistics.median_low(hidden))]
        treadle.save_trace(woven, given.traces / "link_measured.json.gz")
        treadle.save_trace(treadle.simulate(woven.program, costs), given.traces / "link_predicted.json.gz")
    if rank == 0:
        print(json.dumps({"hidden": round(statistics.median(hidden), 4)}), flush=True)
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def main() -> None:
    """Makes the link and starts a process at each end."""
    parser = ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--traces", type=Path)
    for name in ("--rank", "--master", "--address"):
        parser.add_argument(name)
    given = parser.parse_args()
    if given.traces is not None:
        given.traces.mkdir(parents=True, exist_ok=True)
    if given.rank is not None:
        rank_main(int(given.rank), given)
        return
    reason = why_not()
    if reason is not None:
        print(f"no shaped link here: {reason}")
        print(json.dumps({"hidden": None}))
        return
    with ShapedLink(RATE) as link:
        ranks = [start(rank, given, link) for rank in range(EP)]
        try:
            codes = [process.wait(600) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(codes):
        sys.exit(f"ranks exited with {codes}")


def start(rank: int, given: Namespace, link: ShapedLink) -> subprocess.Popen[bytes]:
    """A process at one end of the link."""
    own = [sys.executable, __file__, str(given.rounds), "--rank", str(rank), "--master", link.address(0)]
    own += ["--address", link.address(rank)]
    own += ["--traces", str(given.traces)] if given.traces is not None else []
    env = {**os.environ, "GLOO_SOCKET_IFNAME": link.interface(rank), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(link.command(rank, own), env=env)


if __name__ == "__main__":
    main()
