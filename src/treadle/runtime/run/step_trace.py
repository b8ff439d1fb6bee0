"""What happened: the times that ranks noted, as one Trace on one clock.

A message moves from when both its ends were launched until its reader found it there, which may be later than it came,
as gloo does not tell when that was; on a channel messages follow each other.
"""

from __future__ import annotations

import numpy as np

from treadle.ir.execute import leaders
from treadle.ir.ops import COMMUNICATION, LaneKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Trace


def merge(program: Program, start: Longs, end: Longs, about: str) -> Trace:
    """One Trace of a whole Program from all ranks' times, which are on one clock: messages get both ends' view."""
    lead = leaders(program)
    kinds = program.lane_kind[program.lane_of]
    talks = np.isin(kinds, COMMUNICATION)
    # What goes together started when the last of it was launched; a send ends with its receive.
    launched = np.full(program.num_ops, np.iinfo(np.int64).min)
    np.maximum.at(launched, lead[talks], start[talks])
    done = np.full(program.num_ops, np.iinfo(np.int64).min)
    known = talks & (kinds != LaneKind.SEND)
    np.maximum.at(done, lead[known], end[known])
    start[talks], end[talks] = launched[lead[talks]], done[lead[talks]]
    for lane in np.flatnonzero(np.isin(program.lane_kind, COMMUNICATION)):
        _in_order(start, end, slice(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])))
    begin = int(start.min(initial=np.iinfo(np.int64).max))  # not a receive that was posted and then waited
    return Trace(program, start - begin, end - begin, about=about, measured=True)


def _in_order(start: Longs, end: Longs, lane: slice) -> None:
    """What was found there later than something behind it on the channel had come before that."""
    end[lane] = np.minimum.accumulate(end[lane][::-1])[::-1]
    before = np.r_[np.iinfo(np.int64).min, end[lane][:-1]]
    start[lane] = np.minimum(np.maximum(start[lane], before), end[lane])
