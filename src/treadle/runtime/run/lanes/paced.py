"""Lanes whose ops take the time their costs say: an accelerator's timing on a machine without one, with real messages.

An op ends when its time is over, and what waits for it starts then: its end is known as soon as it has run, and the
threads of the lanes that wait sleep until then themselves, rather than be woken by one that slept. A computation or a
copy runs a quarter of its time after its start, when the lanes that start beside it no longer need the processor. A
message leaves so that it is gone when its time is over. An exchange meets first and then takes its time, on every rank
of its group; what it takes at least (the shortest one of its kind) is part of that time. An op whose costs are 0 takes
what it takes. Sleeping threads wake late, by what the machine is busy with; an op may make up for at most a millisecond
of that, which is between when it could have started and when its lane's thread came to it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter_ns

from treadle.runtime.run.lanes.lane import NEVER, Run
from treadle.runtime.run.lanes.thread import LaneStep, QueuedOp, ThreadLanes

MADE_UP_NS = 1_000_000
"""The most lateness of its lane that an op makes up for."""


class Pace(IntEnum):
    """When in its time an op does its work."""

    AFTER = 0
    BEFORE = 1
    NONE = 2
    TOGETHER = 3


class PacedLanes(ThreadLanes):
    """`dur_ns[op]` is what an op takes, `pace[op]` how; ops of one `kind` run equally long if nothing holds them up."""

    def __init__(
        self, num_lanes: int, dur_ns: Sequence[int], pace: Sequence[Pace], kind: Sequence[int], deadline_s: float
    ) -> None:
        self._dur_ns, self._pace, self._kind = list(dur_ns), list(pace), list(kind)
        self._free = [0] * num_lanes
        self._shortest_ns: dict[int, int] = {}
        super().__init__(num_lanes, len(self._dur_ns), deadline_s)

    def finish(self) -> None:
        """Waits for the last op of each lane, and until its time is over."""
        super().finish()
        _sleep_until(max(self._step.end, default=0))

    def _run(self, lane: int, item: QueuedOp) -> int:
        op, run, step = item.op, item.run, item.step
        pace, kind, dur_ns = self._pace[op], self._kind[op], self._dur_ns[op]
        could = max([self._free[lane], item.launched_ns, *(step.end[other] for other in item.after)])
        if not _stands_at(could, step):
            return NEVER
        came = step.start[op] = perf_counter_ns()
        if pace is Pace.NONE or not dur_ns:
            run()
            return perf_counter_ns()
        start = max(could, came - MADE_UP_NS)
        if pace is Pace.TOGETHER:
            # The last of the group came when the meeting ended, less what it takes if nobody is late.
            met = self._timed(kind, run) - self._shortest_ns[kind]
            start = step.start[op] = max(could, met - min(max(0, came - could), MADE_UP_NS))
        self._free[lane] = until = start + dur_ns
        if pace is Pace.AFTER:
            if not _stands_at(came + dur_ns // 4, step):
                return NEVER
            run()
        if pace is Pace.BEFORE:
            if not _stands_at(until - self._shortest_ns.get(kind, 0), step):
                return NEVER
            self._timed(kind, run)
        return max(until, perf_counter_ns())

    def _timed(self, kind: int, run: Run) -> int:
        """Runs the op, keeps the shortest time of its kind (a millisecond at most), and returns when it ended."""
        begun = perf_counter_ns()
        run()
        ended = perf_counter_ns()
        self._shortest_ns[kind] = min(self._shortest_ns.get(kind, MADE_UP_NS), ended - begun)
        return ended


def _stands_at(until_ns: int, step: LaneStep) -> bool:
    """Sleeps until a time. Returns False if the step has failed meanwhile: then nothing more may run."""
    _sleep_until(until_ns)
    return step.error is None


def _sleep_until(until_ns: int) -> None:
    left = until_ns - perf_counter_ns()
    if left > 0:
        time.sleep(left / 1e9)
