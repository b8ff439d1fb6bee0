"""Lanes as threads. Lane 0 is the caller's thread: its ops run before `launch` returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import NamedTuple

from treadle.dist.device import LateError
from treadle.runtime.run.lanes.lane import NEVER, Run

OWN_LANE = 0


class LaneStep:
    """The state of one step. After an error a late lane writes to the step it belongs to, never to a later one."""

    def __init__(self, num_ops: int) -> None:
        self.done = [threading.Event() for _ in range(num_ops)]
        self.start, self.end = [NEVER] * num_ops, [NEVER] * num_ops
        self.last: dict[int, int] = {}
        self.failed: int | None = None
        self.error: BaseException | None = None


class QueuedOp(NamedTuple):
    """A launched op, and the time of its launch."""

    op: int
    run: Run
    after: Sequence[int]
    launched_ns: int
    step: LaneStep


class ThreadLanes:
    """`num_lanes` lanes for `num_ops` ops. The caller waits for none of them longer than `deadline_s`."""

    ahead = True

    def __init__(self, num_lanes: int, num_ops: int, deadline_s: float) -> None:
        self.deadline_s, self._num_ops = deadline_s, num_ops
        self._step = LaneStep(num_ops)
        self._queues: list[SimpleQueue[QueuedOp | None]] = [SimpleQueue() for _ in range(num_lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"treadle lane {lane}", daemon=True)
            for lane in range(1, num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failed(self) -> int | None:
        """Returns the op whose run raised in this step, or None."""
        return self._step.failed

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        self._step = LaneStep(self._num_ops)

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs an op of lane 0 here, and queues an op of another lane for its thread."""
        item = QueuedOp(op, run, after, perf_counter_ns(), self._step)
        if lane != OWN_LANE:
            self._step.last[lane] = op
            self._queues[lane].put(item)
            return
        self._do(lane, item)
        self._raise()

    def finish(self) -> None:
        """Waits for the last op of each lane."""
        for op in self._step.last.values():
            self._await(self._step, op, self.deadline_s)
        self._raise()

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends."""
        return self._step.start, self._step.end

    def close(self) -> None:
        """Ends the threads."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(self.deadline_s)

    def _work(self, lane: int) -> None:
        queue = self._queues[lane]
        while (item := queue.get()) is not None:
            if item.step is self._step:
                self._do(lane, item)

    def _do(self, lane: int, item: QueuedOp) -> None:
        """Waits for an op's needs, runs it, sets its event.

        After an error it runs nothing but still sets events: nobody hangs.
        """
        op, step = item.op, item.step
        try:
            for other in item.after:
                self._await(step, other, self.deadline_s if lane == OWN_LANE else None)
            if step.error is None:
                step.start[op] = perf_counter_ns()
                step.end[op] = self._run(lane, item)
        except BaseException as error:  # it belongs to the thread that finishes the step
            self._fail(step, op, error)
        finally:
            step.done[op].set()

    def _run(self, lane: int, item: QueuedOp) -> int:
        """Returns when the op ends, never before it has run;

        NEVER if it did not run because another failed meanwhile.
        """
        item.run()
        return perf_counter_ns()

    def _await(self, step: LaneStep, op: int, deadline_s: float | None) -> None:
        if not step.done[op].wait(deadline_s):
            raise LateError(f"Timed out: op {op} has not ended within {self.deadline_s:g} s")

    def _fail(self, step: LaneStep, op: int, error: BaseException) -> None:
        if step.error is None:
            step.failed, step.error = op, error
        for done in step.done:  # nothing runs any more, and nobody is to wait for it
            done.set()

    def _raise(self) -> None:
        if self._step.error is not None:
            raise self._step.error
