"""What happened: the times that ranks noted, as one Trace on one clock.

A rank notes the time behind each instruction, nothing else. A computation lasts from the instruction before it to its
own end. A message moves from when both its ends were launched until its reader found it there, which may be later
than it came, as gloo does not tell when that was; on a channel messages follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from treadle.dist.device import Device
from treadle.ir.execute import leaders
from treadle.ir.ops import COMMUNICATION, LaneKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Trace
from treadle.runtime.run.instructions import Instruction


class Recorder:
    """Turns a rank's noted times into starts and ends of its ops."""

    def __init__(self, program: Program, listed: Sequence[Instruction], device: Device) -> None:
        self.program, self.listed, self.device = program, listed, device
        self.ends: list[Any] = []

    @cached_property
    def _places(self) -> tuple[Longs, Longs, Longs]:
        """The rank's ops, and between which of the noted times each of them lies."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, instruction in enumerate(self.listed):
            first.setdefault(instruction.op, place)
            last[instruction.op] = place + 1
        ops = np.array(sorted(first), np.int64)
        return ops, np.array([first[op] for op in ops]), np.array([last[op] for op in ops])

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        noted = np.array(self.device.nanoseconds(self.ends), np.int64)
        both = np.full((2, self.program.num_ops), -1, np.int64)
        if len(noted) == len(self.listed) + 1:
            ops, first, last = self._places
            both[0, ops], both[1, ops] = noted[first], noted[last]
        return both


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
