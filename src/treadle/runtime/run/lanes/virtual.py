"""Lanes on a clock that only counts. They test that ops run in order and wait for their needs, and measure nothing."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.runtime.run.lanes.lane import Run


class VirtualLanes:
    """Everything runs when it is launched, in the calling thread; `dur_ns[op]` counts as if lanes ran side by side."""

    ahead = False

    def __init__(self, num_lanes: int, dur_ns: Sequence[int]) -> None:
        self._dur_ns, self._num_lanes = list(dur_ns), num_lanes
        self.begin()

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        self.failed: int | None = None
        self._free = [0] * self._num_lanes
        self._start, self._end = [-1] * len(self._dur_ns), [-1] * len(self._dur_ns)

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs the op now, and checks that its needs have ended."""
        late = [other for other in after if self._end[other] < 0]
        if late:
            raise AssertionError(f"op {op} is launched before op {late[0]}, which it waits for")
        self.failed = op
        run()
        self.failed = None
        self._start[op] = max([self._free[lane], *(self._end[other] for other in after)])
        self._end[op] = self._free[lane] = self._start[op] + self._dur_ns[op]

    def finish(self) -> None:
        """Everything has run."""

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends, counted."""
        return self._start, self._end

    def close(self) -> None:
        """Nothing to give back."""
