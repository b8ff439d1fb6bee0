"""IPC buffers: memory that an update rank fills and its worker reads.

On the host a buffer is a memfd, whose descriptor goes over the socket. It has no name, so nothing is left in /dev/shm
however its processes end. It is sealed against shrinking: a reader of a file that shrinks is killed. All pages are
touched when it is made (fresh pages come at a ninth of the speed), and every update uses it again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from treadle.dist.streams import HOST_MEMORY
from treadle.host.processes import no_descriptor_left

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HostBuffer:
    """Shared host memory. `fd` is None in the process that mapped it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd: int | None = fd
        self.tensor = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8, count=size_bytes)

    @classmethod
    def make(cls, size_bytes: int) -> HostBuffer:
        """Allocate a buffer and touch its pages. It has at least one byte: an empty mapping is not possible."""
        size_bytes = max(1, size_bytes)
        fd = os.memfd_create("treadle-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            made = cls(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        made.tensor.zero_()
        return made

    @classmethod
    def map(cls, fd: int, size_bytes: int) -> HostBuffer:
        """Map a buffer that another process made. Takes ownership of the descriptor, even if it raises."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
                raise ValueError("the buffer's memory may shrink; it must be sealed")
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                raise ValueError(f"the buffer is said to have {size_bytes} bytes, its memory has {actual}")
            mapped = cls(fd, size_bytes)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ValueError(f"a buffer cannot be mapped: {no_descriptor_left()}") from error
            raise ValueError(f"what came is no sealed shared memory: {error.strerror}") from error
        finally:
            os.close(fd)
        mapped.fd = None
        return mapped

    def share(self) -> tuple[bytes, int | None]:
        """Return the descriptor; sending it duplicates it."""
        return b"", self.fd

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last view."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostMemory:
    """Host memory without a name, handed over by file descriptors."""

    def make(self, size_bytes: int, device: torch.device) -> HostBuffer:
        """Allocate a buffer."""
        return HostBuffer.make(size_bytes)

    def map(self, handles: Sequence[bytes], fds: list[int], sizes_bytes: Sequence[int]) -> list[HostBuffer]:
        """Map a descriptor for each size."""
        if len(fds) != len(sizes_bytes):
            raise ValueError(f"{len(sizes_bytes)} buffers are named, {len(fds)} descriptors came")
        return [HostBuffer.map(fds.pop(0), size_bytes) for size_bytes in sizes_bytes]

    def name(self, device: torch.device) -> str:
        """Return none: a host has one memory."""
        return ""

    def find(self, name: str) -> torch.device:
        """Return the host."""
        return HOST_MEMORY

    def free_bytes(self, device: torch.device) -> int | None:
        """None: how much of a host's memory an update may take is the caller's choice."""
        return None
