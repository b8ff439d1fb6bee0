"""The differences between a device whose calls return when they have run, and one that runs behind the host.

On a CPU a wait blocks the calling thread, with a deadline. On a GPU a wait only blocks the current stream, so the
thread runs ahead. Time is then read from events on that stream, and the deadline applies where the thread catches up,
at the end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from operator import methodcaller
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

from treadle.dist.streams import DeviceEvent, DeviceStream, Streams, pause, streams_of
from treadle.host.errors import TreadleError

Wait = Callable[[dist.Work], Any]


class LateError(TreadleError, TimeoutError):
    """A wait for this rank's own lanes has reached the deadline. A TimeoutError of the model is not a LateError."""


class GpuLateError(LateError):
    """A wait for this rank's GPU has reached the deadline. A GPU shows neither that it computes nor its wait target."""


class Observer(Protocol):
    """Who is told about a wait for the device."""

    def refuse_void(self) -> None:
        """Raise if the device's work is void."""
        ...

    def look(self) -> None:
        """Look where the device is."""
        ...


class Device(Protocol):
    """One rank's device."""

    wait: Wait
    """Waits for a communication; raises after the deadline."""

    now: Callable[[], Any]
    """Returns the time in a form of this device, which `nanoseconds` converts."""

    def observe(self, observer: Observer) -> None:
        """Has long waits for the device ask the observer whether they are still of use, and to look where it is."""
        ...

    def catch_up(self) -> None:
        """Wait until everything launched so far is done; raises LateError after a deadline without progress."""
        ...

    def await_event(self, event: DeviceEvent) -> None:
        """Wait until the device has come to an event; raises LateError after a deadline without progress."""
        ...

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """Convert times from `now` to nanoseconds of this host's clock."""
        ...


class Host:
    """A CPU: calls return when their work is done."""

    def __init__(self, deadline: timedelta) -> None:
        self.wait: Wait = methodcaller("wait", deadline)
        self.now: Callable[[], Any] = perf_counter_ns

    def observe(self, observer: Observer) -> None:
        """Do nothing: there are no waits for a CPU."""

    def catch_up(self) -> None:
        """Return at once: no work is left."""

    def await_event(self, event: DeviceEvent) -> None:
        """Raise AssertionError: nothing records an event here."""
        raise AssertionError("a CPU has no events")

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """Return the times as they are."""
        return noted


class StreamDevice:
    """A device with streams: ops are launched on the current stream, communication on streams of its own."""

    LOOK_S = 0.05
    """How often a wait looks for progress, and whether it is still of use."""

    def __init__(self, device: torch.device, deadline: timedelta, streams: Streams) -> None:
        self.device, self.deadline_s, self.streams = device, deadline.total_seconds(), streams
        self._observer: Observer | None = None
        self._ahead: list[DeviceEvent] = []  # noted and perhaps not reached yet
        self._lanes: dict[str, DeviceStream] = {}
        self.wait: Wait = methodcaller("wait")  # with a timeout, NCCL's wait blocks the thread
        self.now: Callable[[], Any] = self._event
        self._anchor = self._event(), perf_counter_ns()

    def observe(self, observer: Observer) -> None:
        """Has waits ask the observer from now on."""
        self._observer = observer

    def stream(self, lane: str) -> DeviceStream:
        """Return the stream of a lane, the same for all steps: the allocator caches blocks by stream."""
        if lane not in self._lanes:
            self._lanes[lane] = self.streams.new(self.device, lane)
        return self._lanes[lane]

    def _event(self) -> DeviceEvent:
        event = self.streams.event(self.device, timed=True)
        self._ahead.append(event)
        return event

    def catch_up(self) -> None:
        """Poll an event: a thread blocked in the driver could not be told of a loss."""
        last = self.now()
        self.await_event(last)
        self._ahead.clear()
        self._anchor = last, perf_counter_ns()

    def await_event(self, event: DeviceEvent) -> None:
        """Wait until the device has come to an event; raises after a deadline in which it has come to none at all.

        A step may take longer than the deadline, which is how long one rank waits for another.
        """
        begun = moved = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked >= self.LOOK_S:
                looked = now
                moved = now if self._has_moved() else moved
                if self._observer is not None:
                    self._observer.refuse_void()
                    self._observer.look()
            if now - moved > self.deadline_s:
                raise GpuLateError(f"Timed out: the GPU has finished no op within {self.deadline_s:g} s")
            pause(now - begun)

    def _has_moved(self) -> bool:
        """Return whether an event was reached since the last call."""
        before = len(self._ahead)
        self._ahead = [event for event in self._ahead if not event.query()]
        return len(self._ahead) < before

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """Convert events by their distance to the last one, whose time on the host's clock is known."""
        last, at_ns = self._anchor
        return [at_ns - round(event.elapsed_time(last) * 1e6) for event in noted]


def device_of(device: torch.device, deadline: timedelta) -> Device:
    """Return the waits and times of a torch device."""
    streams = streams_of(device)
    return Host(deadline) if streams is None else StreamDevice(device, deadline, streams)
