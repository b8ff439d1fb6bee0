"""The order in which each rank launches its communication, over all its communicators.

Two ranks that launch two collectives of different groups in opposite orders can deadlock, whatever the streams. In the
order in which ops start in one execution that cannot happen: it is one order over the whole program, and each rank's is
its part of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.execute import Ticks, execute, leaders
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import COMMUNICATION
from treadle.ir.program import NEVER, Ints, Longs, Program

_FINE = 4096  # makes room for a tick that every op takes, so that no op starts with one that needs it
_MOST_TICKS = 2.0**62  # times stay within 64 bits


def order_launches(program: Program, dur: Longs | Ticks) -> Program:
    """Number each rank's communication by when it starts under these durations, with all ranks at full speed."""
    fine = max(1, min(_FINE, int(_MOST_TICKS / max(1.0, _total(program, dur)))))
    if isinstance(dur, Ticks):
        start = execute(program, Ticks(dur.table * fine + 1, dur.pair * fine + 1, dur.factor)).start
    else:
        start = execute(program, dur * fine + 1).start
    lanes = np.flatnonzero(np.isin(program.lane_kind, COMMUNICATION))
    lanes = lanes[np.argsort(program.lane_rank[lanes], kind="stable")]
    rank_ptr = np.searchsorted(program.lane_rank[lanes], np.arange(program.num_ranks + 1))
    launch = np.full(program.num_ops, NEVER, np.int32)
    _number(lanes, rank_ptr, program.lane_ptr, start, leaders(program), launch)
    return replace(program, launch=launch)


def _total(program: Program, dur: Longs | Ticks) -> float:
    """Return the sum of all durations, or a bound of it that is low enough."""
    if not isinstance(dur, Ticks):
        return float(dur.sum(dtype=np.float64))
    bound = float(max(dur.table.max(initial=0), dur.pair)) * program.num_ops
    if bound <= _MOST_TICKS / _FINE:
        return bound
    each = np.where(program.joined, dur.pair, dur.table[program.kind, program.layer])
    return float(each.sum(dtype=np.float64))


@kernel
def _number(lanes: Longs, rank_ptr: Longs, lane_ptr: Longs, start: Longs, leader: Ints, launch: Ints) -> None:
    """Merge the lanes of each rank by start, of equal ones by leader.

    A lane's ops start one after the other. Those that never start are its last; their start is -1, so they come first.
    """
    most = 0
    for rank in range(len(rank_ptr) - 1):
        most = max(most, rank_ptr[rank + 1] - rank_ptr[rank])
    op, left = np.empty(most, np.int64), np.empty(most, np.int64)
    for rank in range(len(rank_ptr) - 1):
        first = rank_ptr[rank]
        num_lanes, num_left = rank_ptr[rank + 1] - first, 0
        for k in range(num_lanes):
            begin, end = lane_ptr[lanes[first + k]], lane_ptr[lanes[first + k] + 1]
            op[k] = end
            while op[k] > begin and start[op[k] - 1] < 0:
                op[k] -= 1
            left[k] = end - begin
            num_left += left[k]
            if op[k] == end:
                op[k] = begin
        for number in range(num_left):
            best = -1
            for k in range(num_lanes):
                if left[k] and (best < 0 or _is_before(start, leader, op[k], op[best])):
                    best = k
            launch[op[best]] = number
            left[best] -= 1
            op[best] += 1
            if op[best] == lane_ptr[lanes[first + best] + 1]:
                op[best] = lane_ptr[lanes[first + best]]


@inlined
def _is_before(start: Longs, leader: Ints, op: int, other: int) -> bool:
    """True if `op` starts before `other`, or with it and its leader comes first."""
    return bool(start[op] < start[other] or (start[op] == start[other] and leader[op] < leader[other]))
