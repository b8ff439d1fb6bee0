"""The stages of a job: which blocks each has, and which rank of the pipeline holds it."""

from __future__ import annotations

from treadle.estimate.job import Job
from treadle.passes.cut import cut_evenly


def stage_rows(job: Job) -> tuple[str, ...]:
    """Return the blocks of each stage along the pipe: the job's layout, or an even cut.

    Raises:
        ValueError: the layout has not as many stages as the schedule, or there are more stages than layers.

    """
    num_stages = job.num_stages
    if job.layout is None:
        return cut_evenly(job.model.blocks, num_stages)
    if len(job.layout) != num_stages:
        raise ValueError(
            f"{job.schedule} with pp={job.pp} vpp={job.vpp} has {num_stages} stages, got a layout of {len(job.layout)}"
        )
    return job.layout


def rank_rows(job: Job) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of each chunk of each rank of the pipeline."""
    rows, placement = stage_rows(job), job.placement
    return tuple(tuple(rows[stage] for stage in placement.stages[rank]) for rank in range(placement.pp))


def is_tied(job: Job) -> bool:
    """Return True if embedding and head share a parameter, and no rank of the pipeline holds both."""
    ends = {0, job.num_stages - 1}
    return job.model.tie_word_embeddings and not any(ends <= set(stages) for stages in job.placement.stages)
