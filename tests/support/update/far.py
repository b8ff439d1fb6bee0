"""A device on the CPU that gives the host no more than a GPU does, for tests of weight updates in real processes.

Its tensors are not the host's: `.numpy()`, `.tolist()` and memoryview refuse them, ops do not mix them with the host's,
and only copies move bytes. It runs behind the host, and as late as it may: a copy from device to device is queued on
the thread's current stream, and is run when an event is waited for, when the host copies from that stream, or when a
collective begins, and not before. So what does not wait for the right stream reads old bytes. Its memory can be shared:
a process maps another's by a handle.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.doubles import double_of
from treadle.dist.rank_world import RankWorld
from treadle.dist.streams import replace_streams
from treadle.update.memory import ipc_buffers
from treadle.update.memory.host import HostBuffer
from treadle.update.rank import broadcast

TYPE = "privateuseone"
FAR = torch.device(TYPE, 0)
FREE_BYTES = 1 << 22

_device = threading.RLock()
_ready = False
_for_good = ExitStack()


def enter() -> None:
    """Let this process use the device, for good."""
    global _ready
    if not _ready:
        _setup_privateuseone_for_python_backend()
        _for_good.enter_context(replace_streams(TYPE, FarStreams()))
        ipc_buffers.MEMORIES[TYPE] = FarMemory()
        dist.Backend.default_device_backend_map[TYPE] = "far"
        broadcast.Buckets = FarBuckets  # type: ignore[misc]
        _ready = True


# ---- streams ---------------------------------------------------------------------------------------------------------


@double_of("torch.Stream", own=("__init__", "tell", "run"))
class FarStream:
    """A queue of calls that nobody runs unless something waits for them."""

    def __init__(self, name: str) -> None:
        self.name, self.told, self.ran = name, 0, 0
        self._calls: deque[Callable[[], Any]] = deque()

    def tell(self, call: Callable[[], Any]) -> int:
        with _device:
            self._calls.append(call)
            self.told += 1
            return self.told

    def run(self, until: int | None = None) -> None:
        """Run what was queued, up to a number of calls."""
        with _device:
            until = self.told if until is None else until
            while self.ran < until:
                self.ran += 1
                self._calls.popleft()()

    def wait_event(self, event: FarEvent, /) -> None:
        """torch 2.13 c10/core/Event.h:108-110: the stream waits, and not the host."""
        self.tell(event.query)

    def wait_stream(self, other: FarStream, /) -> None:
        """torch 2.13 c10/core/Stream.h:125-128: the stream waits for what the other was given so far."""
        at = other.told
        self.tell(lambda: other.run(at))


@double_of("torch.Event", own=("_run",))
class FarEvent:
    """A place in a stream; `ran_ns` is when the device came to it."""

    def __init__(self, stream: FarStream) -> None:
        """torch 2.13 c10/core/Event.h:96-98: recorded behind what the stream was given."""
        self.stream, self.ran_ns = stream, 0
        self.at = stream.tell(self._run)

    def _run(self) -> None:
        self.ran_ns = now_ns()

    def query(self) -> bool:
        """torch 2.13 c10/core/Event.h:118-120: True once the device has come to it, which asking has it do here."""
        self.stream.run(self.at)
        return True

    def elapsed_time(self, end_event: FarEvent, /) -> float:
        """torch 2.13 c10/core/Event.h:122-124: milliseconds, of events that were both reached."""
        return (end_event.ran_ns - self.ran_ns) / 1e6


_default = FarStream("default")
_local = threading.local()
COPY_NS = 10**9
"""What a copy within the device takes, by the device's clock."""
copied_ns: Counter[str] = Counter()
"""What the copies within the device took in this process, by the stream that they ran on."""


streams_made: Counter[str] = Counter()


def now_ns() -> int:
    """The device's clock: the host's, and the time of all copies."""
    return perf_counter_ns() + copied_ns.total()


def current_stream() -> FarStream:
    stream: FarStream = getattr(_local, "stream", _default)
    return stream


class FarStreams:
    """The seam of `treadle.dist.streams`."""

    def new(self, device: torch.device, name: str) -> FarStream:
        streams_made[name] += 1
        return FarStream(name)

    def current(self, device: torch.device) -> FarStream:
        return current_stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = current_stream()
        _local.stream = stream
        try:
            yield
        finally:
            _local.stream = before

    def event(self, device: torch.device, *, timed: bool = False) -> FarEvent:
        return FarEvent(current_stream())

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def communicator(self, made: Any, name: str) -> Any:
        return made

    def begin_op(self, told: str) -> None:
        pass


# ---- tensors ---------------------------------------------------------------------------------------------------------


class FarTensor(torch.Tensor):
    """A tensor of the device; only the device may touch its `memory`."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=FAR,
        )
        made.memory = memory
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FarTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.copy_.default:
            return _copy(*args, **kwargs)
        views = func._schema.returns and all(
            made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns
        )
        to = kwargs.get("device")
        to_host = to is not None and to.type == "cpu"
        if not views:
            current_stream().run()
            _refuse_mixed(func, (args, kwargs))
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if func._schema.name.endswith("_"):
            return args[0]
        return made if to_host else tree_map(far, made)


def far(value: Any) -> Any:
    """A tensor of the device with this memory; other values as they are."""
    return FarTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, FarTensor) else value


def _inner(value: Any) -> Any:
    return value.memory if isinstance(value, FarTensor) else value


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    stream, within = current_stream(), isinstance(target, FarTensor) and isinstance(source, FarTensor)
    into, of = _inner(target), _inner(source)

    def run() -> None:
        into.copy_(of)
        if within:
            copied_ns[stream.name] += COPY_NS

    stream.tell(run)
    if not within and not non_blocking:
        stream.run()
    return target


def _refuse_mixed(func: Any, values: Any) -> None:
    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, FarTensor) and value.dim():
            raise RuntimeError(f"{func} got tensors on {FAR} and on {value.device}")

    tree_map(look, values)


# ---- memory and the process group of updates -------------------------------------------------------------------------


class FarBuffer:
    """Memory of the device, shared by file."""

    def __init__(self, host: HostBuffer) -> None:
        self.size_bytes, self._host = host.size_bytes, host
        self.tensor: torch.Tensor = FarTensor(host.tensor)

    def share(self) -> tuple[bytes, int | None]:
        return f"/proc/{os.getpid()}/fd/{self._host.fd} {next(_shares)}".encode(), None

    def close(self) -> None:
        self._host.close()
        self.tensor = torch.empty(0, dtype=torch.uint8)


_shares = itertools.count()
_mapped: set[bytes] = set()
events: list[str] = []
"""What this process asked of the device's memory and of its group, in order."""


class FarMemory:
    """The memory of the device. A handle is good for one mapping."""

    def make(self, size_bytes: int, device: torch.device) -> FarBuffer:
        events.append("buffer")
        return FarBuffer(HostBuffer.make(size_bytes))

    def map(self, handles: Sequence[bytes], fds: list[int], sizes_bytes: Sequence[int]) -> list[FarBuffer]:
        made = []
        for handle, size_bytes in zip(handles, sizes_bytes, strict=True):
            if handle in _mapped:
                raise ValueError("this handle was mapped before; each mapping needs one of its own")
            _mapped.add(handle)
            fd = os.open(handle.split()[0], os.O_RDWR)
            made.append(FarBuffer(HostBuffer.map(fd, size_bytes)))
        return made

    def name(self, device: torch.device) -> str:
        return str(device.index)

    def find(self, name: str) -> torch.device:
        return torch.device(TYPE, int(name))

    def free_bytes(self, device: torch.device) -> int | None:
        events.append("measured")
        return FREE_BYTES


class FarBuckets(broadcast.Buckets):
    """A group whose collectives begin after the launching thread's current stream, as NCCL's do."""

    def __init__(
        self, name: str, ranks: Sequence[int], world: RankWorld, device: torch.device, deadline: timedelta
    ) -> None:
        super().__init__(name, ranks, world, torch.device("cpu"), deadline)
        events.append("group")
        if device.type == TYPE:
            self.communicator = _FarGroup(self.communicator)


class _FarGroup:
    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def broadcast(self, tensors: list[FarTensor], options: Any) -> Any:
        current_stream().run()
        return self._gloo.broadcast([tensor.memory for tensor in tensors], options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)
