"""Host memory for offloaded tensors: blocks that are taken, given back and reused.

Sizes are rounded up to classes an eighth of a power of two apart, so that micro-batches whose sizes differ a little (a
router's do) share blocks, and the pool stops growing after the first steps.
"""

from __future__ import annotations

import mmap
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from treadle.dist.streams import Streams, streams_of

_SMALLEST = 4096
_EXTENT = 64 << 20


class Pool(Protocol):
    """A pool of blocks. One lane takes blocks, one lane gives them back."""

    @property
    def size_bytes(self) -> int:
        """All memory it has."""
        ...

    def take(self, size_bytes: int) -> Tensor:
        """Returns a block with room for so many bytes, flat and of type uint8, which the current stream may write."""
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
    """Pinned host memory, which a device copies to and from beside its computation.

    torch's pinned allocator keeps the blocks, and reuses one when the copies that used it have ended. Here they are
    only counted: in powers of two, as that allocator rounds, by the most that were taken at once of each size.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._taken: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    @property
    def size_bytes(self) -> int:
        """All memory it has."""
        return sum(size * num for size, num in self._most.items())

    def take(self, size_bytes: int) -> Tensor:
        """Returns a block."""
        size = _power_of_two(size_bytes)
        self._taken[size] += 1
        self._most[size] = max(self._most[size], self._taken[size])
        return self._streams.pinned(size_bytes)

    def give_back(self, room: Tensor) -> None:
        """Counts it; the allocator gets it with the last reference."""
        self._taken[_power_of_two(len(room))] -= 1


def _power_of_two(size_bytes: int) -> int:
    return 1 << max(0, size_bytes - 1).bit_length()


def pool_for(device: torch.device, directory: Path | None) -> Pool:
    """Returns a pool of pinned memory for a device with streams, of a file for a CPU."""
    streams = streams_of(device)
    return FilePool(directory) if streams is None else PinnedPool(streams)
