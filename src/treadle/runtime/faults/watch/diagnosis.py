"""Which rank to name as lost: pure functions of ranks' states and reports.

`culprit` finds the rank behind a failed wait that no report explains: it follows the waits from the rank whose wait
failed to a rank that does not wait. `first` picks the loss to name from several reports: the earliest that is not the
echo of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from treadle.runtime.faults.watch.loss_messages import (
    UNKNOWN,
    Condition,
    LossKind,
    Lost,
    Observation,
    WaitFailure,
    WaitState,
)


class Diagnosis(NamedTuple):
    """How the observed rank was lost; `text` lists ranks that wait for each other."""

    kind: LossKind
    observation: Observation
    text: str = ""


def culprit(asker: int, cause: WaitFailure, states: Mapping[int, Observation]) -> Diagnosis | None:
    """Returns the loss behind the failed wait of `asker`, or None if the states point to no rank.

    A rank without a state counts as silent: its neighbours would have replied for it if they were alive. Where all
    ranks say that they wait, one may hang in its wait; it is found once all waits should have ended, and until then
    the result is None. An asker that is STUCK is the culprit itself, unless the wait of another rank is overdue.
    """
    seen, ends = _follow(asker, states)
    waits = states[asker].waits if asker in states else ()
    gone = [end for end in ends if end.condition is not Condition.ANSWERS]
    if gone:
        named = min(gone, key=lambda end: (end.op == UNKNOWN, end.condition, end.rank))
        return Diagnosis(LossKind.LEFT if named.condition is Condition.LEFT else LossKind.HUNG, named)
    if cause is WaitFailure.STUCK and asker in states:
        before = [end for end in ends if end.wait is WaitState.OVERDUE]
        return Diagnosis(LossKind.HUNG, min(before or [states[asker]], key=_longest))
    if not waits:
        return None
    if cause is WaitFailure.CLOSED and not any(
        state.wait in (WaitState.TIMED_OUT, WaitState.OVERDUE) for state in states.values()
    ):
        # No rank is gone, and none has closed the connection by giving up: the connection itself broke.
        return Diagnosis(LossKind.CUT, states[waits[0]])
    if ends:
        return Diagnosis(LossKind.HUNG, min(ends, key=_longest))
    overdue = [state for state in seen if state.wait is WaitState.OVERDUE]
    if overdue:
        return Diagnosis(LossKind.HUNG, min(overdue, key=_longest))
    if any(state.wait is WaitState.RUNS for state in seen):
        return None
    cycle = _cycle(asker, states)
    if not cycle:
        return None
    return Diagnosis(LossKind.HUNG, states[min(cycle)], text=", ".join(map(str, sorted(cycle))))


def first(reports: Iterable[Lost]) -> Lost:
    """Returns the loss to name. Of two reports of one loss, the one with the exact op is taken.

    Hosts' clocks differ by milliseconds, so times alone do not tell echoes: errors that ranks raise because a peer is
    gone come after other errors and deaths, and losses that were concluded come last.
    """
    reports = list(reports)

    def order(lost: Lost) -> tuple[bool, bool, int, int]:
        return lost.kind not in (LossKind.KILLED, LossKind.RAISED), lost.secondhand, lost.at_ns, lost.rank

    rank, kind = (named := min(reports, key=order)).rank, named.kind
    same = [lost for lost in reports if (lost.rank, lost.kind) == (rank, kind)]
    return min(same, key=lambda lost: (not lost.exact, order(lost)))


def _longest(state: Observation) -> tuple[int, int]:
    return -state.still_ms, state.rank


def _follow(asker: int, states: Mapping[int, Observation]) -> tuple[list[Observation], list[Observation]]:
    """Returns the ranks that the waits lead to, and those at which they end: they compute, or are gone.

    An asker without a wait target may wait for any rank that is gone.
    """
    start = states[asker].waits if asker in states else ()
    to_see = list(start) if start else [rank for rank in states if rank != asker]
    seen: dict[int, Observation] = {}
    ends = []
    while to_see:
        rank = to_see.pop()
        if rank in seen or rank == asker:
            continue
        seen[rank] = state = states.get(rank) or Observation(
            rank, Condition.SILENT, UNKNOWN, 0, 0, exact=False, waits=()
        )
        if state.condition is Condition.ANSWERS and state.waits:
            to_see += state.waits
        else:
            ends.append(state)
    return list(seen.values()), ends


def _cycle(asker: int, states: Mapping[int, Observation]) -> list[int]:
    """Returns ranks that wait for each other, following the first wait target of each; none if a wait ends."""
    path: list[int] = []
    rank = asker
    while rank not in path:
        if rank not in states or not states[rank].waits:
            return []
        path.append(rank)
        rank = states[rank].waits[0]
    return path[path.index(rank) :]
