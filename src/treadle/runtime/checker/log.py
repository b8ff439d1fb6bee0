"""The log of a run on streams: what was launched where, what ordered it, and what became of its memory.

Streams, storages and events are numbers. Stream HOST is the launching thread itself, which reads and writes pinned
memory. The log says nothing about time: it is the same on any machine, and `analysis` judges it without running it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

HOST = 0
"""The number of the host among the streams."""


class LaunchSite(NamedTuple):
    """The op and the line of code that launched something."""

    op: str
    line: str

    def __str__(self) -> str:
        return f"in {self.op} at {self.line}"


class Allocate(NamedTuple):
    """A storage comes from the allocator of a stream, or is pinned memory of the HOST."""

    storage: int
    stream: int
    told: str
    where: LaunchSite


class Free(NamedTuple):
    """Python has let go of a storage."""

    storage: int
    where: LaunchSite


class Use(NamedTuple):
    """A kernel, a copy or a collective reads and writes storages."""

    stream: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kernel: str
    where: LaunchSite


class EventRecord(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int
    where: LaunchSite


class Wait(NamedTuple):
    """A stream waits for an event. `why` is wait_event, wait_stream, Work.wait, or launch of a communicator's own."""

    stream: int
    event: int
    why: str
    where: LaunchSite


class HostWait(NamedTuple):
    """The launching thread waits for a stream, or for an event."""

    stream: int | None
    event: int | None
    why: str
    where: LaunchSite


class Keep(NamedTuple):
    """A storage is recorded for a stream. `by` is record_stream, or the communicator that does it itself."""

    storage: int
    stream: int
    by: str
    where: LaunchSite


Entry: TypeAlias = Allocate | Free | Use | EventRecord | Wait | HostWait | Keep


class Collective(NamedTuple):
    """One call on a communicator, as the other ranks must make it too."""

    communicator: str
    call: str
    told: str
    where: LaunchSite


LAUNCH = "launch"
RECORD_STREAM = "record_stream"
