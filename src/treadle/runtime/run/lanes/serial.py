"""Lanes that run an op at once, in the calling thread; on a device, on the stream that is current there.

What runs beside computation is then what an op has launched and another call waits for. Layer by layer, where calls are
whole ops, nothing does: overlap is measured against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.dist.device import Device, StreamDevice
from treadle.runtime.faults.progress.device_progress import DeviceProgress
from treadle.runtime.run.lanes.lane import Run, in_ns


class SerialLanes:
    """Everything runs when it is launched. An op may be launched in parts.

    It starts when the call before its first ends, and ends with its last: the time is asked for once a call.
    """

    ahead = False

    def __init__(self, ops: Sequence[object], device: Device) -> None:
        self.device, self._num_ops = device, len(ops)
        self._named = list(map(str, ops)) if isinstance(device, StreamDevice) else None
        self._start: list[Any] = [None] * self._num_ops
        self._end: list[Any] = [None] * self._num_ops
        self.failed: int | None = None
        self.progress: DeviceProgress | None = None

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        self.failed = None
        self._start, self._end = [None] * self._num_ops, [None] * self._num_ops
        self._now = self.device.now
        self._last = self._now()

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs it now."""
        self.failed = op
        if self._named is not None:
            self._name(self._named[op])
        if self._start[op] is None:
            self._start[op] = self._last
        if self.progress is not None:
            self.progress.begin(0, op, self._last)
        run()
        self._last = self._end[op] = self._now()
        if self.progress is not None:
            self.progress.end(0, op, self._last)
        self.failed = None

    def finish(self) -> None:
        """Waits for the device."""
        if self._named is not None:
            self._name("")
        self.device.catch_up()

    def _name(self, op: str) -> None:
        """Has a device that reports on ops told which one begins."""
        assert isinstance(self.device, StreamDevice)
        self.device.streams.begin_op(op)

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends."""
        return in_ns(self.device, self._start), in_ns(self.device, self._end)

    def close(self) -> None:
        """Nothing to give back."""
