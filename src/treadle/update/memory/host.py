"""IPC buffers: memory that an update rank fills and its worker reads.

On the host a buffer is a memfd, whose descriptor goes over the socket. It has no name, so nothing is left in /dev/shm
however its processes end. It is sealed against shrinking: a reader of a file that shrinks is killed. All pages are
touched when it is made (fresh pages come at a ninth of the speed), and every update uses it again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Raw = npt.NDArray[np.uint8]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Buffer(Protocol):
    """A buffer, in the process that made it or in one that mapped it."""

    size_bytes: int
    fd: int | None
    """The descriptor to send with a message; None for GPU memory, and in the process that mapped it."""
    handle: bytes
    """The handle to send in a message; empty for host memory."""

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a torch tensor."""
        ...

    @property
    def raw(self) -> Raw:
        """The bytes as a NumPy array on the host."""
        ...

    def close(self) -> None:
        """Release the buffer. Views that still exist keep the memory."""
        ...


class HostBuffer:
    """Shared host memory."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes, self.handle = size_bytes, b""
        self.fd: int | None = fd
        shared = mmap.mmap(fd, size_bytes)
        self.raw: Raw = np.frombuffer(shared, np.uint8, size_bytes)
        self.tensor = torch.frombuffer(shared, dtype=torch.uint8, count=size_bytes)

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
        made.raw[:] = 0
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
            raise ValueError(f"what came is no sealed shared memory: {error.strerror}") from error
        finally:
            os.close(fd)
        mapped.fd = None
        return mapped

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last view."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.raw = np.empty(0, np.uint8)
        self.tensor = torch.empty(0, dtype=torch.uint8)
