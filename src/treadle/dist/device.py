"""What differs between a CPU with gloo and a GPU with NCCL: how a wait ends, how time is told, when a step is over.

On a CPU a wait blocks this thread, with a deadline. On a GPU it only has the compute stream wait, so the thread runs
ahead; time is told by events on that stream, and the deadline is kept where the thread catches up, at the end of a
step.
"""

from __future__ import annotations

from treadle.host.errors import TreadleError

import time
from collections.abc import Callable
from datetime import timedelta
from operator import methodcaller
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

Wait = Callable[[dist.Work], Any]


class LateError(TreadleError, TimeoutError):
    """A wait for this rank's own lanes has reached the deadline. A TimeoutError of its model's is something else."""


class GpuLateError(LateError):
    """The same for its GPU, which does not show whether it computes, or for which rank it waits."""


class Device(Protocol):
    """One rank's device."""

    wait: Wait
    """Waits for a communication, within the deadline."""

    now: Callable[[], Any]
    """The time, as this device tells it: something that `nanoseconds` understands."""

    def catch_up(self) -> None:
        """Waits until everything launched so far is done, within the deadline."""
        ...

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """Noted times as nanoseconds of this host's clock."""
        ...


class Host:
    """A CPU: whatever ran has ended."""

    def __init__(self, deadline: timedelta) -> None:
        self.wait: Wait = methodcaller("wait", deadline)
        self.now: Callable[[], Any] = perf_counter_ns

    def catch_up(self) -> None:
        """Nothing is left."""

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """They are that already."""
        return noted


class Cuda:
    """A GPU: ops are launched on the current stream, and communication beside it."""

    POLL_S = 0.0005

    def __init__(self, device: torch.device, deadline: timedelta) -> None:
        self.device, self.deadline_s = device, deadline.total_seconds()
        self.wait: Wait = methodcaller("wait")  # given a timeout, NCCL's would block the thread
        self.now: Callable[[], Any] = self._event
        self._anchor = self._event(), perf_counter_ns()

    def _event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def catch_up(self) -> None:
        """Polls, as a thread that blocks in the driver could not be told of a loss."""
        last, until = self.now(), time.monotonic() + self.deadline_s
        while not last.query():
            if time.monotonic() > until:
                raise GpuLateError(f"Timed out: the GPU has not finished its step within {self.deadline_s:g} s")
            time.sleep(self.POLL_S)
        self._anchor = last, perf_counter_ns()

    def nanoseconds(self, noted: list[Any]) -> list[int]:
        """By how long they were before the event whose time on the host's clock is known."""
        last, at_ns = self._anchor
        return [at_ns - round(event.elapsed_time(last) * 1e6) for event in noted]


def device_of(device: torch.device, deadline: timedelta) -> Device:
    """How this device is waited for and timed."""
    return Cuda(device, deadline) if device.type == "cuda" else Host(deadline)
