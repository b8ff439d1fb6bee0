"""Lanes as threads. Lane 0 is the caller's own: what is launched on it runs before `launch` returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import NamedTuple

from weft.runtime.lanes.interface import Run

OWN_LANE = 0


class Item(NamedTuple):
    """What was launched, and when."""

    op: int
    run: Run
    after: Sequence[int]
    launched_ns: int
    step: int


class ThreadLanes:
    """`num_lanes` lanes for `num_ops` ops. The caller waits for none of them longer than `deadline_s`."""

    ahead = True

    def __init__(self, num_lanes: int, num_ops: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._done = [threading.Event() for _ in range(num_ops)]
        self._start, self._end = [-1] * num_ops, [-1] * num_ops
        self._step = 0
        self.failed: int | None = None
        self._error: BaseException | None = None
        self._last: dict[int, int] = {}
        self._queues: list[SimpleQueue[Item | None]] = [SimpleQueue() for _ in range(num_lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"weft lane {lane}", daemon=True)
            for lane in range(1, num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        self._step += 1  # what an earlier step has left in the queues is not of this one
        self.failed = self._error = None
        self._last.clear()
        for done in self._done:
            done.clear()
        self._start, self._end = [-1] * len(self._done), [-1] * len(self._done)

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs here, or leaves it to the lane's thread."""
        if lane != OWN_LANE:
            self._last[lane] = op
            self._queues[lane].put(Item(op, run, after, perf_counter_ns(), self._step))
            return
        self._do(lane, Item(op, run, after, perf_counter_ns(), self._step))
        self._raise()

    def finish(self) -> None:
        """Waits for the last op of each lane."""
        for op in self._last.values():
            self._await(op, self.deadline_s)
        self._raise()

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends."""
        return self._start, self._end

    def close(self) -> None:
        """Ends the threads."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(self.deadline_s)

    def _work(self, lane: int) -> None:
        queue = self._queues[lane]
        while (item := queue.get()) is not None:
            if item.step == self._step:
                self._do(lane, item)

    def _do(self, lane: int, item: Item) -> None:
        """Waits, runs, tells; after an error nothing runs, but all are told, so that nobody waits for ever."""
        op = item.op
        try:
            for other in item.after:
                self._await(other, self.deadline_s if lane == OWN_LANE else None)
            if self._error is None:
                self._start[op] = perf_counter_ns()
                self._run(lane, item)
                self._end[op] = perf_counter_ns()
        except BaseException as error:  # it belongs to the thread that finishes the step
            self._fail(op, error)
        finally:
            self._done[op].set()

    def _run(self, lane: int, item: Item) -> None:
        item.run()

    def _await(self, op: int, deadline_s: float | None) -> None:
        if not self._done[op].wait(deadline_s):
            raise TimeoutError(f"Timed out: op {op} has not ended within {self.deadline_s:g} s")

    def _fail(self, op: int, error: BaseException) -> None:
        if self._error is None:
            self.failed, self._error = op, error
        for done in self._done:  # nothing runs any more, and nobody is to wait for it
            done.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
