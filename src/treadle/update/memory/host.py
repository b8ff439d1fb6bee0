"""IPC buffers: memory that an update rank fills and its worker reads.

Host memory is a memfd whose descriptor goes over the socket: it has no name, so nothing is left in /dev/shm however its
processes end. It is sealed against shrinking, as a reader of a file that shrinks is killed. It is touched once when it
is made (fresh pages come at a ninth of the speed) and used again for every update.
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
    """One buffer, in the process that made it or in one that mapped it."""

    size_bytes: int
    fd: int | None
    """To be handed over with the message, where it is host memory."""
    handle: bytes
    """To be handed over in the message, where it is a GPU's."""

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, for torch."""
        ...

    @property
    def raw(self) -> Raw:
        """Its bytes, for the host."""
        ...

    def close(self) -> None:
        """Gives it back. Views that are still about keep the memory."""
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
        """A new one, touched; of one byte where none are needed, as there is no mapping of none."""
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
        """What another process made. Takes the descriptor, whatever happens."""
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
        """The mapping itself goes with its last view."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.raw = np.empty(0, np.uint8)
        self.tensor = torch.empty(0, dtype=torch.uint8)
