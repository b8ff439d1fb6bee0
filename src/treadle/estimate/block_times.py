"""Times of a job's blocks at peak rates, once for all jobs that have the same blocks on the same GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from treadle.estimate.job import Job
from treadle.estimate.parts import actions, block_work
from treadle.estimate.rates import PeakTimes, at_peak, factors


@dataclass(frozen=True)
class BlockTimes:
    """Peak times of each block's actions, what multiplies them, and the blocks' weights."""

    actions: Mapping[str, Mapping[str, PeakTimes]]
    factors: PeakTimes
    parameters: Mapping[str, int]
    experts: Mapping[str, int]


def block_times(job: Job) -> BlockTimes:
    """Return the peak times of a job's blocks. Schedule, stages and batch do not matter to them.

    Raises:
        ValueError: the GPU does not do the job's precision.

    """
    return _cached(
        replace(
            job,
            vpp=1,
            schedule=Job.schedule,
            layout=None,
            offload=False,
            recompute_layers=0,
            sharding="optimizer",
            global_batch_size=job.micro_batch_size * job.dp,
        )
    )


@lru_cache(maxsize=4096)
def _cached(job: Job) -> BlockTimes:
    letters = sorted(set(job.model.blocks))
    parts = {block: block_work(job, block).values() for block in letters}
    return BlockTimes(
        {
            block: {name: at_peak(work, job.cluster, job.precision) for name, work in actions(job, block).items()}
            for block in letters
        },
        factors(job),
        {block: sum(part.parameters for part in parts[block]) for block in letters},
        {block: sum(part.expert_parameters for part in parts[block]) for block in letters},
    )
