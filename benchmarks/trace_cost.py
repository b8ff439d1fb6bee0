"""What recording a step costs it: `python benchmarks/trace_cost.py`.

Two ranks run 1f1b over layers of a real size for a CPU, with and without noting times, in turn
in one run. The last line is JSON: `trace_overhead` is the median over rounds of (with / without) - 1, `spread` its
quartiles, `noted_ns` what one note takes by itself; `share` is all notes of a step over the step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from local_ranks import run_ranks
from treadle.runtime.run.lanes import SerialLanes

RANKS, MICROBATCHES, WIDTH, TOKENS, ROUNDS = 2, 16, 512, 128, 15


num_calls = 0


def silent(lanes: SerialLanes, lane: int, op: int, run: Callable[[], None], after: Sequence[int]) -> None:
    """The same without notes."""
    global num_calls
    num_calls += 1
    lanes.failed = op
    run()
    lanes.failed = None


def stage() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    )


def note_ns() -> float:
    """One reading of the clock and one append."""
    times: list[int] = []
    now, note = time.perf_counter_ns, times.append
    started = now()
    for _ in range(100_000):
        note(now())
    return (now() - started) / 100_000


def rank_main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    schedule = treadle.generate("1f1b", pp=RANKS, microbatches=MICROBATCHES)
    pipe = treadle.Pipeline({0: stage()}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    pipe.step(x, x)
    lanes = pipe._executors.step(reduces=True).lanes
    took: dict[str, list[float]] = {"noting": [], "silent": []}
    for number in range(ROUNDS):
        ways = [("noting", SerialLanes.launch), ("silent", silent)]
        for name, way in ways if number % 2 else ways[::-1]:
            lanes.launch = partial(way, lanes)
            dist.barrier()
            started = time.perf_counter()
            pipe.step(x, x)
            took[name].append(time.perf_counter() - started)
        if rank == 0:
            print(f"with {took['noting'][-1]:.4f} s, without {took['silent'][-1]:.4f} s", flush=True)
    if rank == 0:
        ratios = [a / b - 1 for a, b in zip(took["noting"], took["silent"], strict=True)]
        step_s, notes = statistics.median(took["silent"]), num_calls // ROUNDS + 1
        result = {
            "trace_overhead": round(statistics.median(ratios), 4),
            "spread": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
            "step_s": round(step_s, 3),
            "noted_ns": round(note_ns(), 1),
            "share": round(notes * note_ns() / 1e9 / step_s, 8),
        }
        print(json.dumps(result), flush=True)
    pipe.close()
    dist.destroy_process_group()


def main() -> None:
    run_ranks(rank_main, RANKS, preload=["treadle.runtime"])


if __name__ == "__main__":
    main()
