"""Checks of the rows alone: actions missing, double or unknown, and how many activations are alive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from treadle.ir.action import Action, Kind
from treadle.ir.schedule import Actions, Schedule
from treadle.verifier.finding import MOST, Finding


def check_actions(schedule: Schedule, actions: Actions) -> Iterator[Finding]:
    """T101, T102, T105: every (stage, micro-batch) has one F, and one B or one I and one W."""
    yield from _unknown(schedule, actions)
    count = _count(schedule, actions)
    forward, backward, halves = count[Kind.F], count[Kind.B], (count[Kind.I], count[Kind.W])
    yield from _missing(schedule, Kind.F, forward == 0)
    nothing = (backward == 0) & (halves[0] == 0) & (halves[1] == 0)
    yield from _missing(schedule, Kind.B, nothing)
    for kind in (Kind.I, Kind.W):
        yield from _missing(schedule, kind, (backward == 0) & (count[kind] == 0) & ~nothing)
    for kind in Kind:
        yield from _double(schedule, actions, kind, count[kind] > 1, "runs more than once")
    for kind in (Kind.I, Kind.W):
        both = (backward > 0) & (count[kind] > 0)
        yield from _double(schedule, actions, kind, both, "stands beside B, which has done it")


def _count(schedule: Schedule, actions: Actions) -> npt.NDArray[np.int32]:
    """`[kind, pipe, stage, mb]` -> how often it is there."""
    placement = schedule.placement
    shape = (len(Kind), placement.num_pipes, placement.num_stages, schedule.microbatches_per_pipe)
    real = actions.stage >= 0
    where = (actions.kind[real], actions.pipe[real], actions.stage[real], actions.mb[real])
    count = np.bincount(np.ravel_multi_index(where, shape), minlength=int(np.prod(shape)))
    return count.reshape(shape).astype(np.int32)


def _unknown(schedule: Schedule, actions: Actions) -> Iterator[Finding]:
    for index in np.flatnonzero(actions.stage < 0)[:MOST]:
        action = Action(Kind(int(actions.kind[index])), int(actions.mb[index]), int(actions.chunk[index]))
        yield Finding(
            "T105",
            int(actions.rank[index]),
            int(actions.cell[index]),
            f"{action} has no place here: chunks go to {schedule.vpp - 1}, "
            f"micro-batches to {schedule.microbatches_per_pipe - 1}",
        )


def _missing(schedule: Schedule, kind: Kind, where: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    for pipe, stage, mb in np.argwhere(where)[:MOST]:
        rank, chunk = schedule.placement.holder(int(stage), int(pipe))
        action = Action(kind, int(mb), chunk)
        wanted = ", and so are I and W" if kind is Kind.B else ""
        yield Finding("T101", rank, None, f"{action} of stage {stage} is missing{wanted}")


def _double(
    schedule: Schedule, actions: Actions, kind: Kind, where: npt.NDArray[np.bool_], why: str
) -> Iterator[Finding]:
    if not where.any():
        return
    mine = np.flatnonzero(actions.kind == kind)
    places = zip(actions.rank[mine].tolist(), actions.mb[mine].tolist(), actions.chunk[mine].tolist(), strict=True)
    last = dict(zip(places, actions.cell[mine].tolist(), strict=True))
    for pipe, stage, mb in np.argwhere(where)[:MOST]:
        rank, chunk = schedule.placement.holder(int(stage), int(pipe))
        yield Finding("T102", rank, last[rank, int(mb), chunk], f"{Action(kind, int(mb), chunk)} {why}")


def peak_activations(schedule: Schedule, actions: Actions) -> tuple[int, ...]:
    """The most (mb, chunk) alive at once on each rank, in the order of its row."""
    change = np.select([actions.kind == Kind.F, actions.kind == Kind.I], [1, 0], -1)
    starts = np.searchsorted(actions.rank, np.arange(schedule.pp + 1))
    return tuple(int(np.cumsum(change[a:b]).max(initial=0)) for a, b in pairwise(starts))


def check_limit(schedule: Schedule, actions: Actions, limit: int) -> Iterator[Finding]:
    """T301: at each rank's first cell that takes it past the limit."""
    for rank, peak in enumerate(peak_activations(schedule, actions)):
        if peak <= limit:
            continue
        mine = np.flatnonzero(actions.rank == rank)
        change = np.select([actions.kind[mine] == Kind.F, actions.kind[mine] == Kind.I], [1, 0], -1)
        first = mine[int(np.argmax(np.cumsum(change) > limit))]
        cell = int(actions.cell[first])
        yield Finding(
            "T301",
            rank,
            cell,
            f"{peak} activations alive at once, over the limit of {limit} from {schedule.rows[rank][cell]} on",
        )
