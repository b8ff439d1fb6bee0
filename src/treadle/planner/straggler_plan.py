"""A plan under stragglers: the chosen job and the same job under every other schedule that fits."""

from __future__ import annotations

from treadle.folding.stragglers import Progress, StragglerStudy, straggler_study
from treadle.planner.alternatives import shown
from treadle.planner.job_estimate import Alternative, JobEstimate
from treadle.planner.structure import expert_columns
from treadle.simulator.slowness import Stragglers

DRAWS = 200


def study_plan(
    best: JobEstimate,
    others: tuple[Alternative, ...],
    stragglers: Stragglers,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> StragglerStudy:
    """Simulate steps of the chosen job, and of the best under each other schedule, with the same slow GPUs.

    A GPU holds up the others of its tensor- and context-parallel group at every layer, so these stand for one that is
    slow if any of them is.

    Args:
        best: the chosen job.
        others: its alternatives; those that differ in their schedule and fit take part.
        stragglers: how many GPUs are slow, and how slow.
        draws: how often slow GPUs are drawn.
        seed: of the draws.
        progress: called with the simulations done, and all of them.

    """
    jobs = {shown(best.job, "schedule"): best}
    jobs |= {other.value: other.estimate for other in others if other.knob == "schedule" and other.fits}
    job = best.job
    programs = {name: each.structure.lower(each.job.num_microbatches, each.costs) for name, each in jobs.items()}
    group = job.tp * job.cp
    ep = expert_columns(job, group)
    return straggler_study(
        programs,
        {name: each.costs for name, each in jobs.items()},
        ep=ep,
        dp=job.dp // ep,
        gpus_per_rank=group,
        stragglers=stragglers,
        draws=draws,
        seed=seed,
        progress=progress,
    )
