"""Lanes as streams of a device. The calling thread launches all kernels ahead of it; events keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from treadle.dist.device import StreamDevice
from treadle.dist.streams import DeviceEvent
from treadle.runtime.faults.progress.device_progress import DeviceProgress
from treadle.runtime.run.lanes.lane import Run, in_ns

RUN_AHEAD = 64
"""Compute ops that may be launched and not run. A recorded block is reused only when its event has passed, so a host
that launches a whole step ahead needs more memory than the Program says."""


class StreamLanes:
    """Lane 0 is the stream that is current when a step begins; the others have streams of their own."""

    ahead = False

    def __init__(self, lanes: Sequence[str], ops: Sequence[str], device: StreamDevice) -> None:
        self.device, self._ops = device, ops
        self._others = [device.stream(name) for name in lanes[1:]]
        self.progress: DeviceProgress | None = None
        self.begin()

    def begin(self) -> None:
        """Starts a step. Its kernels wait for the work that the current stream was given before."""
        self.failed: int | None = None
        current = self.device.streams.current(self.device.device)
        self._streams = [current, *self._others]
        self._start: list[DeviceEvent | None] = [None] * len(self._ops)
        self._end: list[DeviceEvent | None] = [None] * len(self._ops)
        self._launched: deque[DeviceEvent] = deque()
        for stream in self._others:
            stream.wait_stream(current)

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Lets the lane's stream wait for events, and launches the op's kernels on it."""
        streams, stream = self.device.streams, self._streams[lane]
        streams.begin_op(self._ops[op])
        for other in after:
            event = self._end[other]
            assert event is not None, f"op {op} is launched before op {other}, which it waits for"
            stream.wait_event(event)
        with streams.on(stream):
            self._start[op] = start = self.device.now()
            if self.progress is not None:
                self.progress.begin(lane, op, start)
            self.failed = op
            run()
            self.failed = None
            self._end[op] = end = self.device.now()
            if self.progress is not None:
                self.progress.end(lane, op, end)
        if lane == 0:
            self._launched.append(end)
            if len(self._launched) > RUN_AHEAD:
                self.device.await_event(self._launched.popleft())

    def finish(self) -> None:
        """Lets the caller's stream wait for all lanes, and waits for it."""
        self.device.streams.begin_op("the end of the step")
        for stream in self._others:
            self._streams[0].wait_stream(stream)
        self.device.catch_up()
        self.device.streams.begin_op("")

    def times(self) -> tuple[list[int], list[int]]:
        """Returns starts and ends, from the distance of their events to the end of the step."""
        return in_ns(self.device, self._start), in_ns(self.device, self._end)

    def close(self) -> None:
        """Does nothing: torch owns the streams."""
