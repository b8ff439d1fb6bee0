"""Separates waiting from moving in what was measured.

A receive, a send or a collective is recorded from when its own rank began it, and so includes the wait for the ranks
that came later. The last to come waits for nobody: the shortest of the ops that go together is what the message took.
That compares durations only, so the clocks of the ranks need not agree. Where a backend lets a send end before its
message has arrived, the send is the shortest, and the message looks as cheap as handing it over.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.kernel import kernel
from treadle.ir.program import Ints, Longs
from treadle.ir.trace import Trace


def shortest(trace: Trace) -> Longs:
    """The duration of each op; of ops that go together, the shortest one's."""
    program = trace.program
    return _shortest(program.lane_ptr, *program.groups, trace.end - trace.start)


def without_waiting(trace: Trace) -> Trace:
    """Move the starts of ops that go together so late that none of them waits for another; ends stay.

    None starts before its lane has ended the op before: a lane does one thing at a time, however early it was asked.
    """
    program, start = trace.program, trace.end - shortest(trace)
    follows = np.repeat(program.lane_group >= 0, np.diff(program.lane_ptr))
    follows[program.lane_ptr[:-1][np.diff(program.lane_ptr) > 0]] = False
    later = np.flatnonzero(follows)
    start[later] = np.minimum(np.maximum(start[later], trace.end[later - 1]), trace.end[later])
    return replace(trace, start=start)


@kernel
def _shortest(lane_ptr: Longs, group_ptr: Longs, group_lane: Ints, dur: Longs) -> Longs:
    least = dur.copy()
    for group in range(len(group_ptr) - 1):
        members = group_lane[group_ptr[group] : group_ptr[group + 1]]
        num = -1
        for lane in members:
            length = lane_ptr[lane + 1] - lane_ptr[lane]
            num = length if num < 0 else min(num, length)
        for k in range(num):
            low = dur[lane_ptr[members[0]] + k]
            for lane in members:
                low = min(low, dur[lane_ptr[lane] + k])
            for lane in members:
                least[lane_ptr[lane] + k] = low
    return least
