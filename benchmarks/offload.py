"""What offload saves and what it costs: `python benchmarks/offload.py [rounds]`.

Four processes, interleaved-overlap over PP4 with two chunks a rank, 16 micro-batches, four MoE layers a chunk, paced by
DeepSeek-V3's published profile (preset deepseek-v3-h800, copies included) scaled so that a step takes about 10 s. What
layers save is real: about 1 MB a layer and micro-batch. In each round the same pipeline runs once with what it saves
left where it is and counted, and once offloaded.

    peak_error    the most bytes of saved tensors alive at once, the largest over ranks, over the simulator's
    peak_ratio    the same over that without offload
    anon_ratio    how far the process's own (anonymous) memory rises over a step, over that without offload
    slowdown      the step's time over that without offload

The last line is JSON, medians over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from local_ranks import join, run_ranks, scaled
from treadle.moe import MoELayer
from treadle.runtime.model.saved import SavedReport

PP, VPP, MICROBATCHES, LAYERS = 4, 2, 16, 4
WIDTH, HIDDEN, EXPERTS, TOKENS = 128, 128, 2, 128
STEP_S = 10.0


def scaled_costs() -> treadle.Costs:
    """The preset, scaled so that the step is predicted to take `STEP_S`."""
    costs = treadle.load_costs("deepseek-v3-h800")
    schedule = treadle.generate("interleaved-overlap", pp=PP, vpp=VPP, microbatches=MICROBATCHES)
    return scaled(costs, schedule, LAYERS, STEP_S)[0]


def pipeline(costs: treadle.Costs, saved: Any) -> treadle.Pipeline:
    """The same layers each time."""
    mesh = init_device_mesh("cpu", (PP,), mesh_dim_names=("pp",))
    schedule = treadle.generate("interleaved-overlap", pp=PP, vpp=VPP, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    stages = {c: nn.Sequential(*[MoELayer(WIDTH, HIDDEN, EXPERTS) for _ in range(LAYERS)]) for c in range(VPP)}
    loss_fn = nn.functional.mse_loss
    return treadle.Pipeline(
        stages, schedule, mesh=mesh, loss_fn=loss_fn, lanes="paced", costs=costs, saved=saved, deadline_s=60
    )


class Anonymous:
    """Samples the process's anonymous memory, every few milliseconds."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.first_bytes = self.most_bytes = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most_bytes = max(self.most_bytes, anonymous_bytes())

    def __enter__(self) -> Anonymous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def rise_bytes(self) -> int:
        """From the first to the most."""
        return self.most_bytes - self.first_bytes


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def one_step(pipe: treadle.Pipeline, x: torch.Tensor) -> dict[str, Any]:
    """What it took and what it held, the largest over ranks."""
    dist.barrier()
    started = time.monotonic()
    with Anonymous() as memory:
        pipe.step(x, x)
    dist.barrier()
    elapsed_s = time.monotonic() - started
    assert pipe.report is not None
    assert pipe.report.saved is not None
    saved = pipe.report.saved
    most = torch.tensor([saved.peak, memory.rise_bytes, saved.pool])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    peak, rise, pool = most.tolist()
    return {"s": elapsed_s, "peak": peak, "rise": rise, "pool": pool, "saved": saved}


def simulated_peak(pipe: treadle.Pipeline, costs: treadle.Costs, saved: SavedReport) -> int:
    """The largest over ranks, for what layers were seen to save."""
    layout = replace(pipe.program.layout, saved=saved.by_kind, saved_unit="bytes")
    program = replace(pipe.program, layout=layout)
    return int(treadle.measure(treadle.simulate(program, costs)).peak)


def rank_main(rank: int, port: int, num_rounds: int) -> None:
    """What each process does; rank 0 tells."""
    join(rank, port, PP)
    costs = scaled_costs()
    pipes = {name: pipeline(costs, name) for name in ("count", "offload")}
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    for pipe in pipes.values():
        pipe.step(x, x)  # finds out shapes, and makes the pool
    rounds = []
    for _ in range(num_rounds):
        left, out = one_step(pipes["count"], x), one_step(pipes["offload"], x)
        predicted = simulated_peak(pipes["offload"], costs, out["saved"])
        rounds.append(
            {
                "peak_error": out["peak"] / predicted - 1,
                "peak_ratio": out["peak"] / left["peak"],
                "anon_ratio": out["rise"] / left["rise"],
                "slowdown": out["s"] / left["s"] - 1,
            }
        )
        if rank == 0:
            print(
                f"left: {left['s']:.3f} s, {left['peak'] / 1e6:.1f} MB saved, memory +{left['rise'] / 1e6:.1f} MB; "
                f"offloaded: {out['s']:.3f} s, {out['peak'] / 1e6:.1f} MB ({predicted / 1e6:.1f} predicted), "
                f"memory +{out['rise'] / 1e6:.1f} MB, pool {out['pool'] / 1e6:.0f} MB",
                flush=True,
            )
    if rank == 0:
        names = list(rounds[0])
        print(json.dumps({name: round(statistics.median(r[name] for r in rounds), 4) for name in names}), flush=True)
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    run_ranks(rank_main, PP, num_rounds, preload=["torch.distributed", "treadle.runtime", "treadle.moe"])


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the kernel, to be seen
    main()
