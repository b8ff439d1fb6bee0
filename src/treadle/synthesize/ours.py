"""The schedules of ours that have a given placement and size."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Kind, Schedule
from treadle.schedules import known
from treadle.synthesize.problem import StepProblem


def our_schedules(problem: StepProblem) -> Iterator[Schedule]:
    """Yield each schedule of the problem's placement and size; without those that split backwards it keeps whole."""
    placement = problem.placement
    for family in known().values():
        try:
            size = family.size(placement.pp, placement.vpp, problem.num_microbatches)
        except ValueError:
            continue
        if family.placement(size.pp, size.vpp).stages != placement.stages:
            continue
        schedule = family.generate(size)
        if schedule.placement.pipes == placement.pipes and (problem.splits or not _is_split(schedule)):
            yield schedule


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is Kind.W for rank in range(schedule.pp) for action in schedule.actions(rank))
