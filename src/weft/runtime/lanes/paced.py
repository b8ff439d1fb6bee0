"""Lanes whose ops take the time their costs say: an accelerator's timing on a machine without one, with real messages.

A computation or a copy runs and then sleeps until its time is over; it runs a moment after it starts, as the lanes that
start beside it need the processor at once and it does not. A message leaves so that it is gone when its time is over.
An exchange meets first and then takes its time, on every rank of its group; how long the meeting itself takes at least
(the shortest one seen) is part of that time. Sleeping threads wake late, by what the machine is busy with; an op may
make up for at most a millisecond of that, which is between when it could have started and when its lane's thread came
to it.
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

AFTER_NS = 1_000_000
"""How long after its start a computation runs, unless that is more than a quarter of its time."""


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
        self._shortest_ns: dict[Pace, int] = {}
        super().__init__(num_lanes, len(self._dur_ns), deadline_s)

    def _run(self, lane: int, item: Item) -> None:
        op, run, pace, step, dur_ns = item.op, item.run, self._pace[item.op], item.step, self._dur_ns[item.op]
        if pace is Pace.NONE:
            run()
            return
        came = perf_counter_ns()
        could = max([self._free[lane], item.launched_ns, *(step.end[other] for other in item.after)])
        start = max(could, came - MADE_UP_NS)
        if pace is Pace.TOGETHER:
            # The last of the group came when the meeting ended, less what it takes if nobody is late.
            met = self._timed(pace, run) - self._shortest_ns[pace]
            start = step.start[op] = max(could, met - min(max(0, came - could), MADE_UP_NS))
        self._free[lane] = until = start + dur_ns
        if pace is Pace.AFTER:
            if dur_ns >= 4 * AFTER_NS:
                _sleep_until(came + AFTER_NS)
            run()
        if pace is Pace.BEFORE:
            _sleep_until(until - self._shortest_ns.get(pace, 0))
            self._timed(pace, run)
        _sleep_until(until)

    def _timed(self, pace: Pace, run: Run) -> int:
        """Runs, and keeps the shortest time that took, a millisecond at most; when it ended."""
        begun = perf_counter_ns()
        run()
        ended = perf_counter_ns()
        self._shortest_ns[pace] = min(self._shortest_ns.get(pace, MADE_UP_NS), ended - begun)
        return ended


def _sleep_until(until_ns: int) -> None:
    left = until_ns - perf_counter_ns()
    if left > 0:
        time.sleep(left / 1e9)
