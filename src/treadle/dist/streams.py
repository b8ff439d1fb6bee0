"""The seam to a device that runs behind the host: streams, events, the allocator, pinned memory.

A CPU has none: `streams_of` returns None, and what is called has run when the call returns. Every accelerator of torch
has the same ones, `Accelerator`, over torch's device-agnostic API. Nothing else asks torch for a stream, so a device
that only notes what it is told, as the stream checker does, sees everything that orders kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Return whether everything before the point is done."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds to a later event; both are timed."""
        ...


class DeviceStream(Protocol):
    """An in-order queue of the device."""

    def wait_event(self, event: Any, /) -> None:
        """Lets what is launched from now on wait for the event."""
        ...

    def wait_stream(self, other: Any, /) -> None:
        """Lets what is launched from now on wait for everything that was launched on another stream."""
        ...


class Streams(Protocol):
    """What the runtime asks of a device that runs behind the host."""

    def new(self, device: torch.device, name: str) -> DeviceStream:
        """Return a new stream; its kernels go before those of the stream that computes. Reports use its name."""
        ...

    def current(self, device: torch.device) -> DeviceStream:
        """Return the stream on which this thread launches."""
        ...

    def on(self, stream: DeviceStream) -> AbstractContextManager[Any]:
        """Make a stream the current one for a block."""
        ...

    def event(self, device: torch.device, *, timed: bool = False) -> DeviceEvent:
        """Record an event on the current stream."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """Tells the allocator that the current stream uses a tensor which another stream may have allocated.

        Without it the memory is given to the next tensor of that other stream when Python lets go of this one, even if
        the current stream has yet to read it. Events order kernels; they do not order the allocator.
        """
        ...

    def pinned(self, size_bytes: int) -> Tensor:
        """Return host memory that the device copies to and from beside its computation, as uint8.

        It is reused only when all copies that read or write it have ended.
        """
        ...

    def communicator(self, made: Any, name: str) -> Any:
        """Return the communicator to use in place of the one that was made."""
        ...

    def begin_op(self, told: str) -> None:
        """What is launched from now on belongs to this op, "" for none; a report names it."""
        ...


class Accelerator:
    """The streams of any accelerator that torch knows."""

    def new(self, device: torch.device, name: str) -> DeviceStream:
        """Make a torch.Stream of high priority, as FSDP2 makes those of its collectives."""
        return torch.Stream(device, priority=-1)

    def current(self, device: torch.device) -> DeviceStream:
        """Return torch's current stream."""
        return torch.accelerator.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return the stream, which is a context manager."""
        made: AbstractContextManager[Any] = stream
        return made

    def event(self, device: torch.device, *, timed: bool = False) -> DeviceEvent:
        """Make and record a torch.Event."""
        event = torch.Event(device, enable_timing=timed)
        event.record(torch.accelerator.current_stream(device))
        return event

    def keep(self, tensor: Tensor) -> None:
        """Record the current stream for the caching allocator."""
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def pinned(self, size_bytes: int) -> Tensor:
        """Allocates from torch's pinned allocator, which itself waits for the copies of a block before it reuses it."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=HOST_MEMORY, pin_memory=True)

    def communicator(self, made: Any, name: str) -> Any:
        """Return it as it is."""
        return made

    def begin_op(self, told: str) -> None:
        """Do nothing: a profiler's range already has the op's name."""


HOST_MEMORY = torch.device("cpu", 0)
"""The host's memory, whatever torch's default device is. Control messages name it by its index; a CPU that the stream
checker takes for a device has none."""

_ACCELERATOR = Accelerator()
_WITHOUT = ("cpu", "meta")
_replaced: dict[str, Streams] = {}


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device, None where calls return when their work is done."""
    if device.type in _replaced:
        return _replaced[device.type]
    return None if device.type in _WITHOUT else _ACCELERATOR


@contextmanager
def replace_streams(device_type: str, streams: Streams) -> Iterator[None]:
    """Give the devices of a type other streams for a block, as the stream checker does for a CPU."""
    if device_type in _replaced:
        raise ValueError(f"the streams of {device_type} are replaced already; leave that block first")
    _replaced[device_type] = streams
    try:
        yield
    finally:
        del _replaced[device_type]


def keep(tensor: Tensor) -> None:
    """Tells the allocator, where there are streams, that the current one uses the tensor."""
    if tensor.is_cpu and not _replaced:  # a device's type costs twenty times that
        return
    streams = streams_of(tensor.device)
    if streams is not None:
        streams.keep(tensor)


# -- numbers between host and device -----------------------------------------------------------------------------------


def upload(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor of the device. The host does not wait, unlike with `torch.tensor`."""
    made = torch.tensor(numbers, dtype=dtype, device=HOST_MEMORY)
    streams = streams_of(device)
    if streams is None or not made.numel():
        return made.to(device)
    room = streams.pinned(made.nbytes).view(dtype).view(made.shape)
    room.copy_(made)
    there = torch.empty(made.shape, dtype=dtype, device=device)
    return there.copy_(room, non_blocking=True)


AwaitEvent: TypeAlias = Callable[[DeviceEvent], None]

SPIN_S, SHORT_S = 0.0002, 0.005
SHORT_PAUSE_S, LONG_PAUSE_S = 0.00002, 0.0005


def pause(waited_s: float) -> None:
    """Pause between two queries of an event that was waited for so long: first not at all, as kernels are short."""
    if waited_s >= SPIN_S:
        time.sleep(SHORT_PAUSE_S if waited_s < SHORT_S else LONG_PAUSE_S)


def _poll(event: DeviceEvent) -> None:
    """Wait for an event. A thread blocked in the driver would notice nothing else, so it queries instead."""
    begun = time.monotonic()
    while not event.query():
        pause(time.monotonic() - begun)


class Download:
    """A tensor of the device on its way to the host; `tensor` and `tolist` wait for it, and for nothing after it."""

    def __init__(self, tensor: Tensor) -> None:
        streams = streams_of(tensor.device)
        self._event: DeviceEvent | None = None
        if streams is None or not tensor.numel():
            self._room = tensor.detach()
            return
        self._room = streams.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._room.copy_(tensor.detach(), non_blocking=True)
        self._event = streams.event(tensor.device)

    def tensor(self, await_event: AwaitEvent | None = None) -> Tensor:
        """Return the tensor on the host. Where other ranks send it, `await_event` ends the wait if one is lost."""
        if self._event is not None:
            (await_event or _poll)(self._event)
            self._event = None
        return self._room

    def tolist(self) -> Any:
        """Return the numbers."""
        return self.tensor().tolist()
