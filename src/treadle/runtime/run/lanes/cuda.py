"""Lanes as CUDA streams. The calling thread launches all kernels ahead of the GPU; events keep their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from treadle.dist.device import Cuda
from treadle.runtime.run.lanes.interface import Run


class CudaLanes:
    """Lane 0 is the stream that is current when a step begins; the others have streams of their own."""

    ahead = False

    def __init__(self, num_lanes: int, num_ops: int, device: Cuda) -> None:
        self.device, self._num_ops = device, num_ops
        self._others = [torch.cuda.Stream(device.device) for _ in range(1, num_lanes)]  # type: ignore[no-untyped-call]
        self.begin()

    def begin(self) -> None:
        """Starts a step. Its kernels wait for the work that the current stream was given before."""
        self.failed: int | None = None
        current = torch.cuda.current_stream(self.device.device)
        self._streams = [current, *self._others]
        self._start: list[torch.cuda.Event | None] = [None] * self._num_ops
        self._end: list[torch.cuda.Event | None] = [None] * self._num_ops
        for stream in self._others:
            stream.wait_stream(current)

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Lets the lane's stream wait for events, and launches the op's kernels on it."""
        stream = self._streams[lane]
        for other in after:
            event = self._end[other]
            assert event is not None, f"op {op} is launched before op {other}, which it waits for"
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            self._start[op] = self.device.now()
            self.failed = op
            run()
            self.failed = None
            self._end[op] = self.device.now()

    def finish(self) -> None:
        """Lets the caller's stream wait for all lanes, and waits for it."""
        for stream in self._others:
            self._streams[0].wait_stream(stream)
        self.device.catch_up()

    def times(self) -> tuple[list[int], list[int]]:
        """Returns starts and ends, from the distance of their events to the end of the step."""
        both = []
        for events in (self._start, self._end):
            known = [event for event in events if event is not None]
            told = iter(self.device.nanoseconds(known))
            both.append([next(told) if event is not None else -1 for event in events])
        return both[0], both[1]

    def close(self) -> None:
        """Does nothing: torch owns the streams."""
