"""The critical path of a folded step: back through its end, then through the replica that all waited for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.folding.folding import Folded
from treadle.folding.step_tail import OpMeeting
from treadle.ir.program import Bools, Ints, Longs
from treadle.ir.trace import Trace
from treadle.simulator.path import PathSummary, Visits, path_to, summarize_visits


class _Tip(NamedTuple):
    """Where the path is on its way back: at the i-th op of the tail of a row.

    If not `late`, it is at what that op waits for outside the tail; i is -1 if nothing in the tail ends last.
    """

    row: int
    i: int
    late: bool


def folded_path(folded: Folded) -> PathSummary:
    """Summarize a chain of ops that makes the folded step as long as it is.

    Example:
        >>> from treadle.folding.folding import fold
        >>> unit = treadle.load_costs("unit")
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=4), unit)
        >>> path = folded_path(fold(program, unit, ep=1, dp=3, slowness=np.array([1, 1, 1, 2, 1, 1.0])))
        >>> path.length // unit.clock.ticks, list(path.by_rank)
        (27, [0, 3])

    """
    chain: list[_Tip] = []
    tip: _Tip | None = _last(folded)
    while tip is not None and tip.late:
        chain.append(tip)
        tip = _cause(folded, tip)
    late = _late_visits(folded, chain[::-1])
    body = _body_visits(folded, tip) if tip is not None else None
    parts = [late] if body is None else [body, late]
    return summarize_visits(Visits(*map(np.concatenate, zip(*parts, strict=True))), folded.clock)


def _last(folded: Folded) -> _Tip:
    """Return what ends last in the step."""
    rank, column = divmod(int(np.argmax(folded.ends)), folded.mesh.num_columns)
    row, tail = int(folded.kinds.row[column]), folded.replicas.tail
    ends = np.where(tail.rank == rank, folded.tail.end[row], -1)
    if ends.max(initial=-1) == folded.makespan:
        return _Tip(row, int(np.argmax(ends)), late=True)
    return _Tip(row, -1, late=False)


def _cause(folded: Folded, tip: _Tip) -> _Tip | None:
    """Return what made an op of the tail start, on its own row if it was there, or None if nothing did."""
    tail = folded.replicas.tail
    began = int(folded.tail.start[tip.row, tip.i])
    meeting = next(meeting for meeting in tail.meetings if tip.i in meeting.ops)
    for i in sorted(meeting.ops, key=lambda i: i != tip.i):
        for late, ends, places in ((True, folded.tail.end, tail.inside[i]), (False, folded.ready, (i,))):
            for place in places:
                rows = _rows(ends[:, place] == began, meeting, tip.row)
                if len(rows) and began > 0:
                    return _Tip(int(rows[0]), place, late)
    return None


def _rows(found: Bools, meeting: OpMeeting, own: int) -> Longs:
    """Return the rows that an op may have waited for, its own first."""
    rows: Longs = np.flatnonzero(found)
    rows = rows[np.argsort(rows != own, kind="stable")]
    return rows if meeting.shared else rows[rows == own]


def _late_visits(folded: Folded, chain: list[_Tip]) -> Visits:
    tail = folded.replicas.tail
    rows, ops = np.array([[tip.row, tip.i] for tip in chain], np.int64).reshape(-1, 2).T
    pipeline = folded.pipeline
    empty = np.zeros(pipeline.num_ops, np.int64)
    of_pipeline = Visits.of(Trace(pipeline, empty, empty, folded.clock), tail.ops[ops].tolist())
    start, end = folded.tail.start[rows, ops], folded.tail.end[rows, ops]
    return of_pipeline._replace(start=start, end=end, rank=_mesh_ranks(folded, tail.rank[ops], rows))


def _body_visits(folded: Folded, tip: _Tip) -> Visits:
    """Walk back through a replica, from the op that the tail waited for."""
    kind = int(np.searchsorted(folded.kinds.first, tip.row, side="right")) - 1
    num_columns, first = len(folded.kinds.members[kind]), int(folded.kinds.first[kind])
    trace = folded.trace(kind)
    of_row = trace.end.reshape(num_columns, -1)[tip.row - first]
    wanted = folded.replicas.tail.body[tip.i] if tip.i >= 0 else np.arange(len(of_row))
    wanted = wanted[wanted >= 0]
    op = int(wanted[np.argmax(of_row[wanted])])
    visits = Visits.of(trace, path_to(trace, (tip.row - first) * len(of_row) + op))
    rank, column = np.divmod(visits.rank, num_columns)
    return visits._replace(rank=_mesh_ranks(folded, rank, first + column))


def _mesh_ranks(folded: Folded, rank: Ints, row: Longs) -> Ints:
    """Return ranks of the mesh: of each row the first column, which for rows of one kind are in one replica."""
    _, column = np.unique(folded.kinds.row, return_index=True)
    found: Ints = (rank * folded.mesh.num_columns + column[row]).astype(np.int32)
    return found
