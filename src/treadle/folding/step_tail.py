"""The end of a step over a whole mesh: reductions over all replicas, and what waits for them.

All other ops of a step meet only those of their own replica. The tail is a few ops on each rank, so it is computed
with arrays over rows: a row is a GPU column (one expert-parallel place in one replica, over all pipeline ranks) that
stands for all columns with its times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.costs import Costs, durations
from treadle.ir.ops import REDUCTIONS, STEP_END, LaneKind
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.simulator.slowness import Factors

_LATE = (*REDUCTIONS, *STEP_END)
_SHARED = (LaneKind.DP, LaneKind.TIED, LaneKind.WORLD)
"""Lanes that all replicas share."""


class TailTimes(NamedTuple):
    """`start[row, i]` and `end[row, i]` of the i-th op of the tail."""

    start: Longs
    end: Longs


@dataclass(frozen=True)
class OpMeeting:
    """Ops of the tail that run together; if `shared`, they run together over all rows as well."""

    ops: tuple[int, ...]
    shared: bool


@dataclass(frozen=True, eq=False)
class StepTail:
    """The tail of one pipeline's Program.

    `ops[i]` is the index of the i-th op in the Program, `rank[i]` its rank and `ticks[i]` its duration at full speed.
    `body[i]` are the ops outside the tail that it waits for, `inside[i]` those inside (positions in `ops`); the op
    before it on its lane is among them. `meetings` are in an order in which they can run.
    """

    ops: Longs
    rank: Ints
    ticks: Longs
    body: Ints
    inside: tuple[tuple[int, ...], ...]
    meetings: tuple[OpMeeting, ...]

    @classmethod
    def of(cls, program: Program, costs: Costs) -> StepTail:
        """Find the tail of a pipeline.

        Raises:
            ValueError: an op that is not of the tail waits for one that is: replicas then wait for each other in the
                middle of the step.

        """
        reason = why_not(program)
        if reason is not None:
            raise ValueError(f"the mesh cannot be folded: {reason}; simulate it unfolded")
        ops = np.flatnonzero(_is_late(program)).astype(np.int64)
        position = {int(op): i for i, op in enumerate(ops)}
        waits = [_waits(program, int(op)) for op in ops]
        inside = tuple(tuple(position[op] for op in wanted if op in position) for wanted in waits)
        return cls(
            ops=ops,
            rank=program.lane_rank[program.lane_of[ops]],
            ticks=durations(program, costs)[ops] if len(ops) else np.zeros(0, np.int64),
            body=padded([[op for op in wanted if op not in position] for wanted in waits]),
            inside=inside,
            meetings=_in_order(_meetings(program, ops), inside),
        )

    def run(self, ready: Longs, factor: Factors) -> TailTimes:
        """Compute the tail's times.

        Args:
            ready: `[row, i]`, when all that the i-th op waits for outside the tail has ended.
            factor: `[row, rank]`, by which a rank is slower.

        """
        start, end = np.zeros_like(ready), np.zeros_like(ready)
        takes = np.rint(self.ticks * factor[:, self.rank]).astype(np.int64)
        for meeting in self.meetings:
            begin = np.stack([self._begin(i, ready, end) for i in meeting.ops])
            if meeting.shared:
                begin[:] = begin.max()
                longest = takes[:, meeting.ops].max()
            for i, at in zip(meeting.ops, begin, strict=True):
                start[:, i] = at
                end[:, i] = at + (longest if meeting.shared else takes[:, i])
        return TailTimes(start, end)

    def ends(self, done: Longs, times: TailTimes) -> Longs:
        """Return `[row, rank]`, when the last op of a rank ends; `done` is when it ends outside the tail."""
        ends = done.copy()
        np.maximum.at(ends.T, self.rank, times.end.T)
        return ends

    def _begin(self, i: int, ready: Longs, end: Longs) -> Longs:
        begin = ready[:, i]
        for before in self.inside[i]:
            begin = np.maximum(begin, end[:, before])
        return begin


def why_not(program: Program) -> str | None:
    """Return why replicas of a pipeline cannot be simulated one by one, or None if they can."""
    if program.layout.is_update:
        return "a weight update has no replicas"
    if program.layout.num_replicas > 1:
        return f"the program is of all {program.num_ranks} GPUs already; folding starts from one pipeline"
    late = _is_late(program)
    shared = np.isin(program.lane_kind, _SHARED)[program.lane_of]
    odd = np.flatnonzero(shared & ~late)
    if len(odd):
        return f"{_named(program, int(odd[0]))} meets the other replicas and is no reduction at the step's end"
    waiter = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    real = program.dep >= 0
    pairs = np.column_stack([waiter[real], program.dep[real]])
    later = np.setdiff1d(np.arange(1, program.num_ops), program.lane_ptr)
    pairs = np.concatenate([pairs, np.column_stack([later, later - 1])])
    wrong = pairs[~late[pairs[:, 0]] & late[pairs[:, 1]]]
    if len(wrong):
        waits, wanted = (_named(program, int(op)) for op in wrong[0])
        return f"{waits} waits in the middle of the step for {wanted}, and so for all replicas"
    return None


def padded(lists: list[list[int]]) -> Ints:
    """Return a table with a row for each list, filled up with NEVER."""
    table = np.full((len(lists), max(map(len, lists), default=0)), NEVER, np.int32)
    for row, entries in zip(table, lists, strict=True):
        row[: len(entries)] = entries
    return table


def latest(end: Longs, table: Ints) -> Longs:
    """Return for each row of `end` and each row of a padded table the latest end of the table's ops; 0 for none."""
    if not table.shape[1]:
        return np.zeros((len(end), len(table)), np.int64)
    found: Longs = np.where(table >= 0, end[:, table], 0).max(axis=2)
    return found


def _is_late(program: Program) -> Bools:
    return np.isin(program.kind, _LATE)


def _named(program: Program, op: int) -> str:
    return f"{program.op(op)} on rank {program.op(op).lane.rank}"


def _waits(program: Program, op: int) -> list[int]:
    """What an op waits for, with the op before it on its lane."""
    wanted = program.dep[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist()
    opens = op == program.lane_ptr[program.lane_of[op]]
    return [op for op in wanted if op >= 0] + ([] if opens else [op - 1])


def _meetings(program: Program, ops: Longs) -> list[OpMeeting]:
    """Ops on shared lanes run together by group and place, as `treadle.passes.mesh.spread` joins them."""
    together: dict[tuple[int, int, int], list[int]] = {}
    for i, op in enumerate(ops.tolist()):
        lane = int(program.lane_of[op])
        kind, group = int(program.lane_kind[lane]), int(program.lane_group[lane])
        place = int(op - program.lane_ptr[lane])
        shared = kind in _SHARED
        key = (kind, group if group >= 0 else -1 - lane, place) if shared else (-1, i, 0)
        together.setdefault(key, []).append(i)
    return [OpMeeting(tuple(members), shared=key[0] >= 0) for key, members in together.items()]


def _in_order(meetings: list[OpMeeting], inside: tuple[tuple[int, ...], ...]) -> tuple[OpMeeting, ...]:
    """Sort meetings so that each comes after those it waits for."""
    done: set[int] = set()
    ordered: list[OpMeeting] = []
    left = meetings
    while left:
        free = [meeting for meeting in left if all(done.issuperset(inside[i]) for i in meeting.ops)]
        if not free:
            raise ValueError("the program does not finish: 'treadle verify' shows why")
        done.update(i for meeting in free for i in meeting.ops)
        ordered += free
        left = [meeting for meeting in left if not done.issuperset(meeting.ops)]
    return tuple(ordered)
