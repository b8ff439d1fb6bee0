"""What benchmarks of several ranks share: processes in one gloo group, and costs for a step of a given length."""

from __future__ import annotations

import multiprocessing as mp
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import treadle


def run_ranks(rank_main: Callable[..., None], world: int, *given: Any, preload: Sequence[str]) -> None:
    """`rank_main(rank, port, *given)` in `world` processes; a forkserver imports `preload` once for all of them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ranks = [context.Process(target=rank_main, args=(rank, store.port, *given)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()  # when one fails, gloo tells the others that its connection is closed
    if any(process.exitcode for process in ranks):
        sys.exit(f"ranks exited with {[process.exitcode for process in ranks]}")


def join(rank: int, port: int, world: int) -> None:
    """Makes this process a rank, with one thread to compute."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def scaled(costs: treadle.Costs, schedule: treadle.Schedule, layers: int, step_s: float) -> tuple[treadle.Costs, float]:
    """Costs, all scaled alike so that the step is predicted to take `step_s`; and the factor."""
    trace = treadle.simulate(treadle.lower(schedule, costs, treadle.LoweringOptions(layers=layers, moe=True)), costs)
    factor = step_s / (trace.makespan / trace.clock.ticks * 1e-6)
    parts = {name: {k: round(v * factor) for k, v in getattr(costs, name).items()} for name in ("layer", "message")}
    return replace(costs, **parts), factor
