"""Lanes whose ops take the time their costs say: an accelerator's timing on a machine without one, with real messages.

A computation or a copy runs and then sleeps until its time is over. A message leaves when its time is over, so that
it arrives then. An exchange meets first and then takes its time, on every rank of its group; how long the meeting
itself takes at least (the shortest one seen) is part of that time. Sleeping threads wake late, by what the machine is
busy with; an op may make up for at most a millisecond of that, which is between when it could have started and when its
lane's thread came to it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter_ns

from weft.runtime.lanes.interface import Run
from weft.runtime.lanes.thread import Item, ThreadLanes

MADE_UP_NS = 1_000_000
"""The most lateness of its lane that an op makes up for."""


class Pace(IntEnum):
    """How an op takes its time."""

    AFTER = 0
    BEFORE = 1
    NONE = 2
    TOGETHER = 3


class PacedLanes(ThreadLanes):
    """`dur_ns[op]` is what an op takes, `pace[op]` how."""

    def __init__(self, num_lanes: int, dur_ns: Sequence[int], pace: Sequence[Pace], deadline_s: float) -> None:
        self._dur_ns, self._pace = list(dur_ns), list(pace)
        self._free = [0] * num_lanes
        self._meeting_ns = MADE_UP_NS
        super().__init__(num_lanes, len(self._dur_ns), deadline_s)

    def _run(self, lane: int, item: Item) -> None:
        op, run, pace, step = item.op, item.run, self._pace[item.op], item.step
        if pace is Pace.NONE:
            run()
            return
        ready = max([self._free[lane], item.launched_ns, *(step.end[other] for other in item.after)])
        if pace is Pace.TOGETHER:
            ready = step.start[op] = max(ready, self._meet(run))
        until = max(ready, perf_counter_ns() - MADE_UP_NS) + self._dur_ns[op]
        if pace is Pace.AFTER:
            run()
        self._free[lane] = until
        _sleep_until(until)
        if pace is Pace.BEFORE:
            run()

    def _meet(self, run: Run) -> int:
        """When the last of the group came, as far as this rank can tell."""
        begun = perf_counter_ns()
        run()
        met = perf_counter_ns()
        self._meeting_ns = min(self._meeting_ns, met - begun)
        return met - self._meeting_ns


def _sleep_until(until_ns: int) -> None:
    left = until_ns - perf_counter_ns()
    if left > 0:
        time.sleep(left / 1e9)
