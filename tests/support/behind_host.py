"""A device that runs behind the host, as far as a CPU can be one: communicators of NCCL's manners, over gloo.

    with replace_streams("cpu", BehindHost(wrap)):      # before the Pipeline is made
        ...

Its ops have run when they are launched. What differs from a CPU is what Treadle does then: it makes communicators of
the device beside those for control, its waits have no deadline, and it catches up at the end of a step.
`wrap(made, name)` replaces each communicator of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.support.doubles import double_of


@double_of("torch.Event")
class _Event:
    def __init__(self) -> None:
        """torch 2.13 c10/core/Event.h:96-98: recorded at once; what was launched has run."""
        self.at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """torch 2.13 c10/core/Event.h:118-120: True once the device has come to it."""
        return True

    def elapsed_time(self, end_event: _Event, /) -> float:
        """torch 2.13 c10/core/Event.h:122-124: milliseconds, of events that were both reached."""
        return (end_event.at_ns - self.at_ns) / 1e6


@double_of("torch.Stream")
class _Stream:
    def wait_event(self, event: Any, /) -> None:
        """torch 2.13 c10/core/Event.h:108-110: the stream waits, and not the host; here all have run."""

    def wait_stream(self, other: Any, /) -> None:
        """torch 2.13 c10/core/Stream.h:125-128: the stream waits, and not the host; here all have run."""


class BehindHost:
    """The streams of such a device."""

    def __init__(self, wrap: Callable[[Any, str], Any]) -> None:
        self.communicator = wrap

    def new(self, device: torch.device, name: str) -> _Stream:
        return _Stream()

    def current(self, device: torch.device) -> _Stream:
        return _Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self, device: torch.device, *, timed: bool = False) -> _Event:
        return _Event()

    def keep(self, tensor: Tensor) -> None:
        pass

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def begin_op(self, told: str) -> None:
        pass


@double_of("torch.distributed.ProcessGroupNCCL", own=("__init__", "launch"))
class Wrapped:
    """A communicator whose calls go to another, with `wait(work)` called for each of their waits."""

    def __init__(self, made: Any, wait: Callable[[Any], Any] | None = None) -> None:
        self.made, self._wait = made, wait if wait is not None else lambda work: work.wait()

    def launch(self, call: str, tensors: list[Tensor], *args: Any) -> Any:
        """Launches a call; a subclass may look at the tensors."""
        return _Work(getattr(self.made, call)(*args), self._wait)

    def send(self, tensors: list[Tensor], *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:910-913: launches, and returns work whose wait is `wait`."""
        return self.launch("send", tensors, tensors, *more)

    def recv(self, tensors: list[Tensor], *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:915-918: launches, and returns work whose wait is `wait`."""
        return self.launch("recv", tensors, tensors, *more)

    def allreduce(self, tensors: list[Tensor], *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:842-844: launches, and returns work whose wait is `wait`."""
        return self.launch("allreduce", tensors, tensors, *more)

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:885-888: launches, and returns work whose wait is `wait`."""
        return self.launch("_reduce_scatter_base", [rows], output, rows, *more)

    def _allgather_base(self, output: Tensor, row: Tensor, *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:865-868: launches, and returns work whose wait is `wait`."""
        return self.launch("_allgather_base", [row], output, row, *more)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:860-863: launches, and returns work whose wait is `wait`."""
        return self.launch("allgather", tensors, gathered, tensors, *more)

    def alltoall_base(self, output: Tensor, rows: Tensor, *more: Any) -> Any:
        """torch 2.13 ProcessGroupNCCL.hpp:898-903: launches, and returns work whose wait is `wait`."""
        return self.launch("alltoall_base", [rows], output, rows, *more)

    def abort(self) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1553-1577: ends what is waited for; gloo's ends nothing."""

    def shutdown(self) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1586-1634: gives back what gloo gives back with its last reference."""


class _Work:
    def __init__(self, made: Any, wait: Callable[[Any], Any]) -> None:
        self._made, self._wait = made, wait

    def wait(self, *_: Any) -> Any:
        return self._wait(self._made)
