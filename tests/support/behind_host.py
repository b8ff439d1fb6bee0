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


class _Event:
    def __init__(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event, /) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


class _Stream:
    def wait_event(self, event: Any, /) -> None:
        pass

    def wait_stream(self, other: Any, /) -> None:
        pass


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


class Wrapped:
    """A communicator whose calls go to another, with `wait(work)` called for each of their waits."""

    def __init__(self, made: Any, wait: Callable[[Any], Any] | None = None) -> None:
        self.made, self._wait = made, wait if wait is not None else lambda work: work.wait()

    def launch(self, call: str, tensors: list[Tensor], *args: Any) -> Any:
        """Launches a call; a subclass may look at the tensors."""
        return _Work(getattr(self.made, call)(*args), self._wait)

    def send(self, tensors: list[Tensor], *more: Any) -> Any:
        return self.launch("send", tensors, tensors, *more)

    def recv(self, tensors: list[Tensor], *more: Any) -> Any:
        return self.launch("recv", tensors, tensors, *more)

    def allreduce(self, tensors: list[Tensor], *more: Any) -> Any:
        return self.launch("allreduce", tensors, tensors, *more)

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, *more: Any) -> Any:
        return self.launch("_reduce_scatter_base", [rows], output, rows, *more)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], *more: Any) -> Any:
        return self.launch("allgather", tensors, gathered, tensors, *more)

    def alltoall_base(self, output: Tensor, rows: Tensor, *more: Any) -> Any:
        return self.launch("alltoall_base", [rows], output, rows, *more)

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _Work:
    def __init__(self, made: Any, wait: Callable[[Any], Any]) -> None:
        self._made, self._wait = made, wait

    def wait(self, *_: Any) -> Any:
        return self._wait(self._made)
