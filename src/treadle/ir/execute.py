"""The one execution of a Program: every lane in order, every op as soon as it can start.

Verifier, simulator and passes all use it.

An op starts when it heads its lane and what it waits for has ended; ops of a group start together when all of them
can. Times follow from that alone, whatever order the sweep takes: a lane that has to wait is put aside until the op it
waits for has ended, so each op is looked at a few times at most.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.columns import GroupTable, Waits
from treadle.ir.kernel import inlined, kernel
from treadle.ir.program import Bools, Bytes, Ints, Longs, Program, Shorts


class Times(NamedTuple):
    """Start and end of each op; -1 for those that never start, of which there are `num_left`."""

    start: Longs
    end: Longs
    num_left: int = 0

    @property
    def finished(self) -> bool:
        """True if every op ended."""
        return self.num_left == 0


class Ticks(NamedTuple):
    """Durations by kind and layer: `table[kind, layer]`, `pair` for joined ops, times `factor[rank]`.

    They stand for an array with an entry for each op, and save its memory.
    """

    table: Longs
    pair: int
    factor: npt.NDArray[np.float64]


def execute(
    program: Program, dur: Longs | Ticks, *, after: Ints | None = None, own_ends: bool = False, begin: int = 0
) -> Times:
    """Compute when each op starts and ends. Times are in the unit of `dur`.

    `dur[i]` is how long op i takes; ops that go together take the longest of their times, or with `own_ends` (and an
    array of durations) each its own from their common start on. `after[i]` is one more op that op i waits for, or -1.
    The first ops start at `begin`.
    """
    lanes = _Lanes(program.lane_ptr, program.lane_group)
    joined = program.joined if program.joined.any() else None
    each = factor = table = None
    if isinstance(dur, Ticks):
        table = _TickTable(program.kind, program.layer, dur.table, dur.pair)
        factor = dur.factor[program.lane_rank] if (dur.factor != 1.0).any() else None
    else:
        each = dur
    at, groups, waits = _Progress.at_start(program, begin), GroupTable.of(program), Waits.of(program)
    num_left = _sweep(at, lanes, groups, waits, after, joined, each, each if own_ends else None, table, factor)
    return Times(at.start, at.end, num_left)


def makespans(program: Program, dur: Longs) -> Longs:
    """Execute a program once for each row of durations, and return how long each execution takes, or -1.

    Ops that go together end each after its own duration. A duration may be negative: a clock that is a little off
    makes a message end before it starts. -1 stands for an execution that does not finish.
    """
    if not program.num_ops:
        return np.zeros(len(dur), np.int64)
    lanes, joined = _Lanes(program.lane_ptr, program.lane_group), program.joined if program.joined.any() else None
    begin = -int(np.minimum(dur, 0).sum(axis=1).min(initial=0))  # an end below 0 means that the op has not run
    at, groups, waits = _Progress.at_start(program, begin), GroupTable.of(program), Waits.of(program)
    found = np.empty(len(dur), np.int64)
    _sweep_each(at, lanes, groups, waits, joined, np.ascontiguousarray(dur, np.int64), begin, found)
    return found


def leaders(program: Program) -> Ints:
    """Return for each op the first of the ops it goes together with, or the op itself if there is none."""
    lead = np.arange(program.num_ops, dtype=np.int32)
    ptr, lanes = program.groups
    size = np.diff(program.lane_ptr)
    for start, stop in pairwise(ptr):
        members = lanes[start:stop]
        if not len(members):  # a number that no lane has
            continue
        whole = int(size[members].min())  # past the shortest lane nothing goes together
        first = program.lane_ptr[members[0]]
        for begin in program.lane_ptr[members[1:]]:
            lead[begin : begin + whole] = np.arange(first, first + whole)
    if program.joined.any():
        _join(lead, program.joined, program.lane_ptr)
    return lead


@kernel
def _join(lead: Ints, joined: Bools, lane_ptr: Longs) -> None:
    """Give joined ops, and what they go together with, one leader."""
    for lane in range(len(lane_ptr) - 1):
        for op in range(lane_ptr[lane] + 1, lane_ptr[lane + 1]):
            if joined[op]:
                one, other = _leader(lead, op - 1), _leader(lead, op)
                lead[max(one, other)] = min(one, other)
    for op in range(len(lead)):  # leaders come before those that they lead
        lead[op] = lead[lead[op]]


@inlined
def _leader(lead: Ints, op: int) -> int:
    """Follow the leaders of an op to the one that leads itself, and shorten the way."""
    while lead[op] != op:
        lead[op] = lead[lead[op]]
        op = lead[op]
    return op


class _Lanes(NamedTuple):
    """`ptr[l]` to `ptr[l + 1]` are the ops of lane l, `group[l]` its group or -1."""

    ptr: Longs
    group: Ints


class _TickTable(NamedTuple):
    """`table[kind, layer]` is how long an op takes, `pair` how long joined ops take."""

    kind: Bytes
    layer: Shorts
    table: Longs
    pair: int


class _Progress(NamedTuple):
    """The state of the sweep.

    start, end          of each op; `end` is -1 until the op has run
    head, free          of each lane: its next op, and when it has finished the one before
    ready               of each lane that waits for the others of its group: since when
    behind              of each such lane: the op after those that start with its head
    arrived, longest    of each group: how many lanes wait there, and the longest duration among their ops
    first_waiter        of each op: a lane that waits for it, or -1
    next_waiter         of each waiting lane: the next one that waits for the same op, or -1
    todo                a stack of lanes that can go on
    """

    start: Longs
    end: Longs
    head: Longs
    free: Longs
    ready: Longs
    behind: Longs
    arrived: Ints
    longest: Longs
    first_waiter: Ints
    next_waiter: Ints
    todo: Ints

    @classmethod
    def at_start(cls, program: Program, begin: int = 0) -> _Progress:
        """Make the state in which nothing has run and all lanes are to do, the first one first, from `begin` on."""
        num_ops, num_lanes, num_groups = program.num_ops, program.num_lanes, len(program.groups[0])
        return cls(
            start=np.empty(num_ops, np.int64),  # ops that never start get theirs at the end
            end=np.full(num_ops, -1, np.int64),
            head=program.lane_ptr[:-1].copy(),
            free=np.full(num_lanes, begin, np.int64),
            ready=np.zeros(num_lanes, np.int64),
            behind=np.zeros(num_lanes, np.int64),
            arrived=np.zeros(num_groups, np.int32),
            longest=np.zeros(num_groups, np.int64),
            first_waiter=np.full(num_ops, -1, np.int32),
            next_waiter=np.full(num_lanes, -1, np.int32),
            todo=np.arange(num_lanes - 1, -1, -1, dtype=np.int32),
        )


_CLEAR = -2
"""No op holds this one up. -1 (NEVER) is a dependency that nothing provides."""


@kernel
def _sweep(
    at: _Progress,
    lanes: _Lanes,
    groups: GroupTable,
    waits: Waits,
    more: Ints | None,
    joined: Bools | None,
    each: Longs | None,
    own: Longs | None,
    table: _TickTable | None,
    factor: npt.NDArray[np.float64] | None,
) -> int:
    """Run each lane until it has to wait, then the next that can go on, until none can."""
    count = len(lanes.group)
    while count:
        count -= 1
        lane = at.todo[count]
        op, last, group = at.head[lane], lanes.ptr[lane + 1], lanes.group[lane]
        while op < last:
            after = _end_of_joined(joined, op, last)
            time, blocker = _earliest(waits, at.end, op, after, at.free[lane])
            if blocker == _CLEAR:
                time, blocker = _earliest_after(more, at.end, op, time)
            if blocker != _CLEAR:
                at.head[lane] = op
                if blocker >= 0:
                    _put_aside(at, lane, blocker)
                break
            takes = _duration(each, joined, table, factor, op, after, lane)
            if group >= 0:
                count = _meet(at, groups, own, lane, group, op, after, time, takes, count)
                break
            count = _run(at, op, after, time, time + takes, count)
            at.free[lane] = time + takes
            op = after
    return _mark_left(lanes, at.start, at.end)


@kernel
def _sweep_each(
    at: _Progress,
    lanes: _Lanes,
    groups: GroupTable,
    waits: Waits,
    joined: Bools | None,
    rows: Longs,
    begin: int,
    found: Longs,
) -> None:
    """Sweep once for each row of durations, in the same state."""
    num_lanes = len(lanes.group)
    for row in range(len(rows)):
        at.end[:] = -1
        at.head[:] = lanes.ptr[:-1]
        at.free[:] = begin
        at.arrived[:] = 0
        at.longest[:] = 0
        at.first_waiter[:] = -1
        at.next_waiter[:] = -1
        for lane in range(num_lanes):
            at.todo[lane] = num_lanes - 1 - lane
        each = rows[row]
        left = _sweep(at, lanes, groups, waits, None, joined, each, each, None, None)
        found[row] = -1 if left else at.end.max() - begin


@inlined
def _end_of_joined(joined: Bools | None, op: int, last: int) -> int:
    """Return the op after those that start with `op`."""
    after = op + 1
    if joined is not None:
        while after < last and joined[after]:
            after += 1
    return after


@inlined
def _earliest(waits: Waits, end: Longs, op: int, after: int, time: int) -> tuple[int, int]:
    """Return when ops `op` to `after` can start, from `time` on, and a dependency that has not ended, or _CLEAR."""
    first, last, dep = waits.ptr[op], waits.ptr[after], waits.dep
    for k in range(first, last):
        wanted = dep[k]
        if wanted < 0 or end[wanted] < 0:
            return time, wanted
        time = max(time, end[wanted])
    return time, _CLEAR


@inlined
def _earliest_after(more: Ints | None, end: Longs, op: int, time: int) -> tuple[int, int]:
    """Do as `_earliest` for the one more op that `op` waits for."""
    if more is not None and more[op] >= 0:
        if end[more[op]] < 0:
            return time, more[op]
        time = max(time, end[more[op]])
    return time, _CLEAR


@inlined
def _put_aside(at: _Progress, lane: int, blocker: int) -> None:
    """The lane stops; the end of op `blocker` wakes it."""
    at.next_waiter[lane] = at.first_waiter[blocker]
    at.first_waiter[blocker] = lane


@inlined
def _wake(at: _Progress, op: int, count: int) -> int:
    """Put the lanes that wait for `op` on the stack, whose new height is returned."""
    todo, next_waiter = at.todo, at.next_waiter
    waiter = at.first_waiter[op]
    while waiter >= 0:
        todo[count] = waiter
        count += 1
        waiter = next_waiter[waiter]
    return count


@inlined
def _duration(
    each: Longs | None,
    joined: Bools | None,
    table: _TickTable | None,
    factor: npt.NDArray[np.float64] | None,
    op: int,
    after: int,
    lane: int,
) -> int:
    """Return the longest duration of ops `op` to `after`."""
    takes = np.int64(0)
    if each is not None:
        takes = each[op]
        if joined is not None:
            for half in range(op + 1, after):
                takes = max(takes, each[half])
    if table is not None:
        takes = table.table[table.kind[op], table.layer[op]]
        if joined is not None and after > op + 1:
            takes = np.int64(table.pair)
        if factor is not None:
            takes = np.int64(round(takes * factor[lane]))
    return int(takes)


@inlined
def _run(at: _Progress, op: int, after: int, start: int, end: int, count: int) -> int:
    """Run ops `op` to `after` of a lane without a group."""
    for half in range(op + 1, after):
        at.start[half], at.end[half] = start, end
        count = _wake(at, half, count)
    at.start[op], at.end[op] = start, end
    return _wake(at, op, count)


@inlined
def _meet(
    at: _Progress,
    groups: GroupTable,
    own: Longs | None,
    lane: int,
    group: int,
    op: int,
    after: int,
    time: int,
    takes: int,
    count: int,
) -> int:
    """The lane arrives at its group with ops `op` to `after`; the last to arrive runs the ops of all members.

    If one joins two ops that are apart on another lane, none of them ever ends.
    """
    at.head[lane], at.behind[lane], at.ready[lane] = op, after, time
    at.longest[group] = max(at.longest[group], takes)
    at.arrived[group] += 1
    first, last = groups.ptr[group], groups.ptr[group + 1]
    if at.arrived[group] < last - first:
        return count
    for k in range(first, last):
        member = groups.lane[k]
        time = max(time, at.ready[member])
        if at.behind[member] - at.head[member] != after - op:
            return count
    end = time + at.longest[group]
    at.arrived[group], at.longest[group] = 0, 0
    for k in range(first, last):
        member = groups.lane[k]
        mine, behind = at.head[member], at.behind[member]
        for one in range(mine, behind):
            if own is not None:
                end = time + own[one]
            at.start[one], at.end[one] = time, end
            count = _wake(at, one, count)
        at.free[member], at.head[member] = end, behind
        at.todo[count] = member
        count += 1
    return count


@inlined
def _mark_left(lanes: _Lanes, start: Longs, end: Longs) -> int:
    """Set the start of ops that never started to -1, and count them."""
    num_left = 0
    for lane in range(len(lanes.group)):
        for op in range(lanes.ptr[lane + 1] - 1, lanes.ptr[lane] - 1, -1):
            if end[op] >= 0:
                break
            start[op] = -1
            num_left += 1
    return num_left
