"""IPC buffers, wherever their memory is: the interface, and the kind of memory for each type of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from treadle.dist.streams import HOST_MEMORY
from treadle.update.memory.cuda import CudaMemory
from treadle.update.memory.host import HostMemory


class Buffer(Protocol):
    """A buffer, in the process that made it or in one that mapped it."""

    size_bytes: int

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, on their device: what is written here is in the buffer."""
        ...

    def share(self) -> tuple[bytes, int | None]:
        """A handle, or a file descriptor, that one process maps once. Each process, and each new mapping, needs one."""
        ...

    def close(self) -> None:
        """Release the buffer. Views that still exist keep the memory."""
        ...


class BufferMemory(Protocol):
    """Memory of a type of device, which processes can share."""

    def make(self, size_bytes: int, device: torch.device) -> Buffer:
        """Allocate a buffer."""
        ...

    def map(self, handles: Sequence[bytes], fds: list[int], sizes_bytes: Sequence[int]) -> Sequence[Buffer]:
        """Map buffers that another process shared; takes descriptors off `fds`. Raises ValueError for a bad one."""
        ...

    def name(self, device: torch.device) -> str:
        """The device's name in all processes of the host."""
        ...

    def find(self, name: str) -> torch.device:
        """The device of that name in this process. Raises ValueError where it is not visible."""
        ...

    def free_bytes(self, device: torch.device) -> int | None:
        """Bytes that can be allocated now; None where the memory is not measured."""
        ...


MEMORIES: dict[str, BufferMemory] = {"cpu": HostMemory(), "cuda": CudaMemory()}
"""By torch's type of a device."""


def name_of(device: torch.device) -> str:
    """Return a name of the device for buffers of weights on `device`: "cpu", or its type and the name that it has."""
    kind = device.type if device.type in MEMORIES else HOST_MEMORY.type
    return f"{kind} {MEMORIES[kind].name(device)}".strip()


def find(name: str) -> torch.device:
    """Return the device with that `name_of` it. Raises ValueError where this process does not see it."""
    kind, _, own = name.partition(" ")
    return memory_of(kind).find(own)


def memory_of(device_type: str) -> BufferMemory:
    """Return the memory of a type of device. Raises ValueError where there is none."""
    if device_type not in MEMORIES:
        raise ValueError(f"buffers can be on {', '.join(MEMORIES)}, got {device_type!r}; give the Updater one of these")
    return MEMORIES[device_type]
