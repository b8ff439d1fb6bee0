"""Steps of Megatron-core's own pipeline schedules on gloo, marked and profiled, on ranks of torchrun.

    torchrun --nproc-per-node 2 -m tests.support.megatron_job OUT VPP M [GROUP]

Rank R writes torch.profiler's file OUT/rankR.json of the second and third step. Backwards take twice as long as
forwards, asleep.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.profile_pipelining import Wait
from tests.support.megatron_cpu import megatron
from treadle.integrations.marks import mark_megatron

STEPS = 3
FORWARD_S = 0.004


def main(out: Path, vpp: int, num_microbatches: int, group: int | None = None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, pp = dist.get_rank(), dist.get_world_size()
    wait: Any = Wait
    steps = torch.profiler.schedule(wait=0, warmup=1, active=STEPS - 1)
    recording = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=steps)
    with megatron(pp, vpp, rank, group=group, after=lambda x: wait.apply(x, FORWARD_S)) as step:
        with mark_megatron(), recording as profiler:
            for number in range(STEPS):
                step(num_microbatches)
                if number + 1 < STEPS:
                    profiler.step()
        profiler.export_chrome_trace(str(out / f"rank{rank}.json"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
