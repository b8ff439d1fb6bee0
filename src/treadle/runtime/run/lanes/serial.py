"""Lanes without overlap: the calling thread runs one op after the other. Overlap is measured against them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from treadle.runtime.run.lanes.lane import Run


class SerialLanes:
    """Everything runs when it is launched."""

    ahead = False

    def __init__(self, num_ops: int) -> None:
        self._num_ops = num_ops
        self.begin()

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        self.failed: int | None = None
        self._start, self._end = [-1] * self._num_ops, [-1] * self._num_ops

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs it now."""
        self.failed = op
        self._start[op] = perf_counter_ns()
        run()
        self._end[op] = perf_counter_ns()
        self.failed = None

    def finish(self) -> None:
        """Everything has run."""

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends."""
        return self._start, self._end

    def close(self) -> None:
        """Nothing to give back."""
