"""Which rank is to be named: pure functions of what was said.

Two questions are answered here. When a wait failed and nobody told why, who is behind it: that is followed along who
waits for whom, from the rank whose wait failed to one that does not wait. When several losses were told, which was the
first: that is taken from when each was seen, less what is only an echo of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from treadle.runtime.faults.watch.messages import (
    UNKNOWN,
    Condition,
    LossKind,
    Lost,
    Observation,
    WaitFailure,
    WaitState,
)


class Diagnosis(NamedTuple):
    """What became of the rank that is seen here; `text` names a circle of waits."""

    kind: LossKind
    sight: Observation
    text: str = ""


def culprit(asker: int, cause: WaitFailure, states: Mapping[int, Observation]) -> Diagnosis | None:
    """Who is behind the failed wait of `asker`, or None if what is known points to nobody.

    A rank that nothing is known of counts as silent: its neighbours would have spoken for it, had they been there.
    Where all say that they wait, one may hang at its wait instead. It is found once all waits have had their time:
    until then it is nobody. An asker that is stuck is behind it itself, unless another has stood still for longer than
    a wait may take.
    """
    seen, ends = _follow(asker, states)
    waits = states[asker].waits if asker in states else ()
    gone = [sight for sight in ends if sight.condition is not Condition.ANSWERS]
    if gone:
        sight = min(gone, key=lambda sight: (sight.op == UNKNOWN, sight.condition, sight.rank))
        return Diagnosis(LossKind.LEFT if sight.condition is Condition.LEFT else LossKind.HUNG, sight)
    if cause is WaitFailure.STUCK and asker in states:
        before = [sight for sight in ends if sight.wait is WaitState.OVERDUE]
        return Diagnosis(LossKind.HUNG, min(before or [states[asker]], key=_longest))
    if not waits:
        return None
    if cause is WaitFailure.CLOSED and not any(
        sight.wait in (WaitState.TIMED_OUT, WaitState.OVERDUE) for sight in states.values()
    ):
        # Nobody is gone, and nobody has closed it by giving up, so it is the connection itself that broke.
        return Diagnosis(LossKind.CUT, states[waits[0]])
    if ends:
        return Diagnosis(LossKind.HUNG, min(ends, key=_longest))
    overdue = [sight for sight in seen if sight.wait is WaitState.OVERDUE]
    if overdue:
        return Diagnosis(LossKind.HUNG, min(overdue, key=_longest))
    if any(sight.wait is WaitState.RUNS for sight in seen):
        return None
    circle = _circle(asker, states)
    if not circle:
        return None
    return Diagnosis(LossKind.HUNG, states[min(circle)], text=", ".join(map(str, sorted(circle))))


def first(reports: Iterable[Lost]) -> Lost:
    """The loss to name. Two neighbours may report the same one: then the one that read the op itself is taken.

    Clocks of hosts differ by milliseconds, so what is only an echo goes last whenever it was seen: an error that a rank
    raises because its peer is gone, then what was concluded rather than seen.
    """
    reports = list(reports)

    def order(lost: Lost) -> tuple[bool, bool, int, int]:
        return lost.kind not in (LossKind.KILLED, LossKind.RAISED), lost.secondhand, lost.at_ns, lost.rank

    rank, kind = (named := min(reports, key=order)).rank, named.kind
    same = [lost for lost in reports if (lost.rank, lost.kind) == (rank, kind)]
    return min(same, key=lambda lost: (not lost.exact, order(lost)))


def _longest(sight: Observation) -> tuple[int, int]:
    return -sight.still_ms, sight.rank


def _follow(asker: int, states: Mapping[int, Observation]) -> tuple[list[Observation], list[Observation]]:
    """The ranks to which who-waits-for-whom leads, and those at which it ends: they compute, or are gone.

    An asker that did not say whom it waits for may wait for anyone who is gone.
    """
    start = states[asker].waits if asker in states else ()
    to_see = list(start) if start else [rank for rank in states if rank != asker]
    seen: dict[int, Observation] = {}
    ends = []
    while to_see:
        rank = to_see.pop()
        if rank in seen or rank == asker:
            continue
        seen[rank] = sight = states.get(rank) or Observation(
            rank, Condition.SILENT, UNKNOWN, 0, 0, exact=False, waits=()
        )
        if sight.condition is Condition.ANSWERS and sight.waits:
            to_see += sight.waits
        else:
            ends.append(sight)
    return list(seen.values()), ends


def _circle(asker: int, states: Mapping[int, Observation]) -> list[int]:
    """The ranks that wait for each other, where every wait leads to another: the first of each is followed."""
    path: list[int] = []
    rank = asker
    while rank not in path:
        if rank not in states or not states[rank].waits:
            return []
        path.append(rank)
        rank = states[rank].waits[0]
    return path[path.index(rank) :]
