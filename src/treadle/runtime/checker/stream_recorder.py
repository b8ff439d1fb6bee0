"""A device that is not there: its streams run on the CPU in the order of launches, and note what they were told."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.runtime.checker.aside import not_noted
from treadle.runtime.checker.log import (
    HOST,
    RECORD_STREAM,
    Allocate,
    Collective,
    Entry,
    EventRecord,
    Free,
    HostWait,
    Keep,
    LaunchSite,
    Use,
    Wait,
)
from treadle.runtime.checker.stream_findings import FindingKind, StreamFinding

OUTSIDE = "no op"

_PACKAGE = Path(__file__).parents[2]
_SEAM = (
    str(_PACKAGE / "runtime" / "checker"),
    str(_PACKAGE / "dist" / "streams.py"),
    str(_PACKAGE / "dist" / "device.py"),
)
_TORCH = str(Path(torch.__file__).parent)


class NotedStream:
    """A stream of the recorder."""

    def __init__(self, recorder: StreamRecorder, name: str) -> None:
        self.recorder, self.name, self.number = recorder, name, len(recorder.streams)
        recorder.streams.append(name)

    def wait_event(self, event: NotedEvent, why: str = "wait_event") -> None:
        """Notes it."""
        self.recorder.note(Wait(self.number, event.number, why, self.recorder.where()))

    def wait_stream(self, other: NotedStream) -> None:
        """Notes an event on the other stream and the wait for it."""
        self.wait_event(NotedEvent(self.recorder, other), "wait_stream")


class NotedEvent:
    """An event of the recorder, recorded when it is made."""

    def __init__(self, recorder: StreamRecorder, stream: NotedStream) -> None:
        self.recorder, self.at = recorder, time.perf_counter()
        recorder.num_events += 1
        self.number = recorder.num_events
        recorder.note(EventRecord(self.number, stream.number, recorder.where()))

    def query(self) -> bool:
        """Notes that the host waits: it polls until the answer is yes."""
        self.recorder.note(HostWait(None, self.number, "an event", self.recorder.where()))
        return True

    def elapsed_time(self, end_event: NotedEvent) -> float:
        """Returns the milliseconds between the launches."""
        return (end_event.at - self.at) * 1e3


class StreamRecorder:
    """The streams of a device that is not there, and the log of what they were told.

    A storage that it has not seen before was there before it: on the device, from the allocator of the first stream.
    """

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.collectives: list[Collective] = []
        self.streams: list[str] = ["host"]
        self.num_events = 0
        self.op = OUTSIDE
        self.stray: dict[tuple[str, str, str, LaunchSite], int] = {}
        """(node, stream of its forward, stream of its backward, where): autograd would run it on the first."""
        self.misplaced: dict[str, StreamFinding] = {}
        """By line: a kernel that reads a tensor of the host beside one of the device."""
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._num_storages = 0
        self._pageable: set[int] = set()
        self._pinned: set[int] = set()
        self._current = [NotedStream(self, "compute")]
        self._closed = False

    # -- what the runtime asks of streams ----------------------------------------------------------------------------

    def new(self, device: torch.device, name: str) -> NotedStream:
        """Makes a stream."""
        return NotedStream(self, name)

    def current(self, device: torch.device | None = None) -> NotedStream:
        """Returns the stream on which launches go."""
        return self._current[-1]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Makes a stream the current one."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def event(self, device: torch.device | None = None, *, timed: bool = False) -> NotedEvent:
        """Records an event on the current stream."""
        return self.event_on(self._current[-1])

    def event_on(self, stream: NotedStream) -> NotedEvent:
        """Records an event on any stream."""
        return NotedEvent(self, stream)

    def keep(self, tensor: Tensor) -> None:
        """Notes that the current stream is recorded for the tensor's storage."""
        self.record_stream(tensor, self._current[-1], RECORD_STREAM)

    def record_stream(self, tensor: Tensor, stream: NotedStream, by: str) -> None:
        """Notes that a stream is recorded for the tensor's storage."""
        storage = self.storage_of(tensor)
        if storage is not None:
            self.note(Keep(storage, stream.number, by, self.where()))

    def pinned(self, size_bytes: int) -> Tensor:
        """Returns memory of the host that the log follows, too."""
        with not_noted():
            room = torch.empty(size_bytes, dtype=torch.uint8)
        number = self.storage_of(room, home=HOST)
        if number is not None:
            self._pinned.add(number)
        return room

    def begin_op(self, told: str) -> None:
        """Notes to which op the next launches belong."""
        self.op = told or OUTSIDE

    # -- the log -----------------------------------------------------------------------------------------------------

    def note(self, entry: Entry) -> None:
        """Appends to the log."""
        if not self._closed:
            self.log.append(entry)

    def close(self) -> None:
        """Ends the log: what is let go of from here on is not noted."""
        self._closed = True

    def where(self) -> LaunchSite:
        """Returns the op and the innermost line that is neither torch's nor the seam's."""
        frame: Any = sys._getframe(1)
        while frame is not None and not _is_caller(frame.f_code.co_filename):
            frame = frame.f_back
        return LaunchSite(
            self.op, _line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else "an unknown line"
        )

    def storage_of(self, tensor: Tensor, *, home: int | None = None, pageable: bool = False) -> int | None:
        """Returns the number of a tensor's storage, or None if it has no memory. `home` allocates one not seen before.

        Without a home such a storage was there before: from the first stream, the compute stream.
        """
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper
            return None
        if storage.nbytes() == 0:
            return None
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known[0]
        self._num_storages = number = self._num_storages + 1
        self._known[key] = number, weakref.ref(storage, functools.partial(self._freed, key, number))
        if pageable:
            self._pageable.add(number)
        else:
            self.note(Allocate(number, 1 if home is None else home, _told(tensor), self.where()))
        return number

    def _freed(self, key: int, number: int, _: Any) -> None:
        self._known.pop(key, None)
        if number in self._pageable:
            self._pageable.discard(number)
        else:
            self._pinned.discard(number)
            self.note(Free(number, self.where()))

    def is_pageable(self, storage: int | None) -> bool:
        """Returns whether a storage is the host's own, which no stream touches but by a copy that blocks."""
        return storage in self._pageable

    def is_pinned(self, storage: int | None) -> bool:
        """Returns whether a storage is pinned memory of the host."""
        return storage in self._pinned

    def use(self, stream: int, reads: list[int], writes: list[int], kernel: str) -> None:
        """Notes a kernel."""
        if reads or writes:
            self.note(Use(stream, tuple(reads), tuple(writes), kernel, self.where()))

    def misplace(self, kernel: str, tensor: Tensor) -> None:
        """Notes that a kernel of the device was given a tensor of the host."""
        where = self.where()
        known = self.misplaced.get(where.line)
        if known is not None:
            known.times += 1
            return
        told = f"tensor {_told(tensor)}, made in the block without device="
        self.misplaced[where.line] = StreamFinding(FindingKind.ON_HOST, told, f"{kernel} {where}")

    def host_waits(self, why: str) -> None:
        """Notes that the launching thread waits for the current stream."""
        self.note(HostWait(self._current[-1].number, None, why, self.where()))


def _told(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@functools.cache
def _is_caller(path: str) -> bool:
    return not path.startswith((*_SEAM, _TORCH)) and "importlib" not in path and not path.startswith("<")


@functools.cache
def _line(path: str, number: int) -> str:
    file = Path(path)
    inside = file.relative_to(_PACKAGE.parent) if file.is_relative_to(_PACKAGE) else Path(file.parent.name, file.name)
    return f"{inside}:{number}"
