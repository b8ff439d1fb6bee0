"""Host memory for offloaded tensors: blocks that are taken, given back and reused.

Sizes are rounded up to classes an eighth of a power of two apart, so that micro-batches whose sizes differ a little (a
router's do) share blocks, and the pool stops growing after the first steps.
"""

from __future__ import annotations

import mmap
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_SMALLEST = 4096
_EXTENT = 64 << 20


class HostBlock(NamedTuple):
    """`room` is a flat uint8 tensor of at least the size asked for; `free` an event behind its last reader on a GPU."""

    room: Tensor
    free: torch.cuda.Event | None = None


class Pool(Protocol):
    """A pool of blocks. One lane takes blocks, one lane gives them back."""

    size_bytes: int
    """All memory it has."""

    def take(self, size_bytes: int) -> Tensor:
        """Returns a block with room for so many bytes. On a GPU the current stream may write to it."""
        ...

    def give_back(self, room: Tensor) -> None:
        """Returns a block to the pool; it becomes reusable when all work queued on the current stream has finished."""
        ...


def size_class(size_bytes: int) -> int:
    """Returns the size of the block for so many bytes."""
    if size_bytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((size_bytes - 1).bit_length() - 4)
    return -(-size_bytes // step) * step


class FilePool:
    """Memory of a file without a name in `directory`: the kernel may write it out, and it is gone with the process.

    Pages are the file's, not the process's own (anonymous) memory; on a disk they can leave memory altogether.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, prefix="treadle-pool-")  # noqa: SIM115 - as long as the pool
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self.size_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """Returns a used block of the size class, or a new one."""
        size = size_class(size_bytes)
        free = self._free[size]
        if free:
            return free.pop()
        if len(self._rest) < size:
            self._grow(max(_EXTENT, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY))
        room, self._rest = self._rest[:size], self._rest[size:]
        return room

    def give_back(self, room: Tensor) -> None:
        """Keeps the block for the next tensor of its size class."""
        self._free[len(room)].append(room)

    def _grow(self, size: int) -> None:
        self._file.truncate(self.size_bytes + size)
        mapped = mmap.mmap(self._file.fileno(), size, offset=self.size_bytes)
        self._rest = torch.frombuffer(mapped, dtype=torch.uint8)
        self.size_bytes += size


class PinnedPool:
    """Pinned host memory, which a GPU copies to and from beside its computation."""

    def __init__(self) -> None:
        self._free: dict[int, list[HostBlock]] = defaultdict(list)
        self.size_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """Returns a used block whose last copy has been read, or a new one."""
        size = size_class(size_bytes)
        free = self._free[size]
        if free:
            room, read = free.pop()
            if read is not None:
                torch.cuda.current_stream().wait_event(read)
            return room
        self.size_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, room: Tensor) -> None:
        """Keeps the block with an event: its next taker waits for the reads queued on the current stream."""
        read: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream())
        self._free[len(room)].append(HostBlock(room, read))


def pool_for(device: torch.device, directory: Path | None) -> Pool:
    """Returns a pool of pinned memory for a GPU, of a file for a CPU."""
    return PinnedPool() if device.type == "cuda" else FilePool(directory)
