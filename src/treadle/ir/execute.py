"""The one execution: every lane in order, every op as soon as it can. Verifier, simulator and passes all ask it.

An op starts when it heads its lane and what it waits for has ended; ops of a group start together when all of them
can. Times follow from that alone, whatever order the sweep takes: a lane that has to wait is put aside until the op it
waits for has ended, so each op is looked at a few times at most.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.kernel import kernel
from treadle.ir.program import Bools, Bytes, Ints, Longs, Program, Shorts


class Times(NamedTuple):
    """Start and end of each op; -1 for those that never start, of which there are `num_left`."""

    start: Longs
    end: Longs
    num_left: int = 0

    @property
    def finished(self) -> bool:
        """Did every op end."""
        return self.num_left == 0


class Ticks(NamedTuple):
    """How long ops take where little decides it: `table[kind, layer]`, `pair` for joined ops, times `factor[rank]`.

    It says the same as an array with an entry for each op, without the array.
    """

    table: Longs
    pair: int
    factor: npt.NDArray[np.float64]


def execute(program: Program, dur: Longs | Ticks, *, after: Ints | None = None) -> Times:
    """When each op starts and ends, if op i takes `dur[i]`. Ops that go together take the longest of their times.

    `after[i]` is one more op that op i waits for, or -1.
    """
    lanes = (program.lane_ptr, program.lane_group, *program.groups)
    joined = program.joined if program.joined.any() else None
    each = factor = labels = table = None
    pair = 0
    if isinstance(dur, Ticks):
        labels, table, pair = (program.kind, program.layer), dur.table, dur.pair
        factor = dur.factor[program.lane_rank] if (dur.factor != 1.0).any() else None
    else:
        each = dur
    # Each thing that is None is a branch that the compiled kernel does not have.
    return Times(*_sweep(*lanes, program.dep_ptr, program.dep, after, joined, each, labels, table, pair, factor))


def leaders(program: Program) -> Ints:
    """For each op the first of those it goes together with, or itself if there is none."""
    lead = np.arange(program.num_ops, dtype=np.int32)
    opens = np.zeros(program.num_ops, bool)
    opens[program.lane_ptr[:-1][np.diff(program.lane_ptr) > 0]] = True
    for half in np.flatnonzero(program.joined & ~opens):  # in order, so that a row of them has one leader
        lead[half] = lead[half - 1]
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
    return lead


@kernel
def _sweep(
    lane_ptr: Longs,
    lane_group: Ints,
    group_ptr: Longs,
    group_lane: Ints,
    dep_ptr: Longs,
    dep: Ints,
    more: Ints | None,
    joined: Bools | None,
    each: Longs | None,
    labels: tuple[Bytes, Shorts] | None,
    table: Longs | None,
    pair: int,
    factor: npt.NDArray[np.float64] | None,
) -> tuple[Longs, Longs, int]:
    num_lanes, num_ops = len(lane_group), len(dep_ptr) - 1
    start = np.empty(num_ops, np.int64)  # of what never starts: set at the end
    end = np.full(num_ops, -1, np.int64)
    head = lane_ptr[:-1].copy()
    free = np.zeros(num_lanes, np.int64)
    ready = np.zeros(num_lanes, np.int64)
    longest = np.zeros(len(group_ptr), np.int64)
    arrived = np.zeros(len(group_ptr), np.int32)
    first_waiter = np.full(num_ops, -1, np.int32)
    next_waiter = np.full(num_lanes, -1, np.int32)
    todo = np.empty(num_lanes, np.int32)
    count = 0
    for lane in range(num_lanes - 1, -1, -1):
        todo[count] = lane
        count += 1
    while count:
        count -= 1
        lane = todo[count]
        last = lane_ptr[lane + 1]
        group = lane_group[lane]
        time = free[lane]
        op = head[lane]
        while op < last:
            after = op + 1
            if joined is not None:
                while after < last and joined[after]:
                    after += 1
            blocker = -2
            for k in range(dep_ptr[op], dep_ptr[after]):
                wanted = dep[k]
                if wanted < 0 or end[wanted] < 0:
                    blocker = wanted
                    break
                time = max(time, end[wanted])
            if more is not None and blocker == -2 and more[op] >= 0:
                if end[more[op]] < 0:
                    blocker = more[op]
                else:
                    time = max(time, end[more[op]])
            if blocker != -2:
                head[lane] = op
                if blocker >= 0:
                    next_waiter[lane] = first_waiter[blocker]
                    first_waiter[blocker] = lane
                break
            takes = np.int64(0)
            if each is not None:
                takes = each[op]
                if joined is not None:
                    for half in range(op + 1, after):
                        takes = max(takes, each[half])
            if labels is not None and table is not None:
                takes = table[labels[0][op], labels[1][op]]
                if joined is not None and after > op + 1:
                    takes = np.int64(pair)
                if factor is not None:
                    takes = np.int64(round(takes * factor[lane]))
            if group < 0:
                start[op] = time
                if joined is not None:
                    for half in range(op + 1, after):
                        start[half] = time
                        end[half] = time + takes
                        waiter = first_waiter[half]
                        while waiter >= 0:
                            todo[count] = waiter
                            count += 1
                            waiter = next_waiter[waiter]
                time += takes
                end[op] = time
                free[lane] = time
                waiter = first_waiter[op]
                while waiter >= 0:
                    todo[count] = waiter
                    count += 1
                    waiter = next_waiter[waiter]
                op = after
                continue
            head[lane] = op
            ready[lane] = time
            longest[group] = max(longest[group], takes)
            arrived[group] += 1
            if arrived[group] == group_ptr[group + 1] - group_ptr[group]:
                for m in range(group_ptr[group], group_ptr[group + 1]):
                    time = max(time, ready[group_lane[m]])
                ends = time + longest[group]
                arrived[group] = 0
                longest[group] = 0
                for m in range(group_ptr[group], group_ptr[group + 1]):
                    member = group_lane[m]
                    mine = head[member]
                    start[mine] = time
                    end[mine] = ends
                    free[member] = ends
                    head[member] = mine + 1
                    waiter = first_waiter[mine]
                    while waiter >= 0:
                        todo[count] = waiter
                        count += 1
                        waiter = next_waiter[waiter]
                    todo[count] = member
                    count += 1
            break
    num_left = 0
    for lane in range(num_lanes):
        for op in range(lane_ptr[lane + 1] - 1, lane_ptr[lane] - 1, -1):
            if end[op] >= 0:
                break
            start[op] = -1
            num_left += 1
    return start, end, num_left
