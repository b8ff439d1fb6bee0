"""Buffers of updates on the device of threads: memory that processes share, which the device reads and writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch

from treadle import sim_device
from treadle.update.memory import ipc_buffers
from treadle.update.memory.host import HostBuffer


def share_buffers() -> None:
    """Let update ranks and workers of this process have buffers on the device."""
    ipc_buffers.MEMORIES[sim_device.NAME] = SimMemory()


class SimBuffer:
    """Memory of the device, shared by file."""

    def __init__(self, host: HostBuffer, index: int) -> None:
        self.size_bytes, self._host, self._index = host.size_bytes, host, index
        self.tensor = sim_device.in_host_memory(host.tensor, index)

    def share(self) -> tuple[bytes, int | None]:
        return f"/proc/{os.getpid()}/fd/{self._host.fd} {self._index} {next(_shares)}".encode(), None

    def close(self) -> None:
        self._host.close()
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


_shares = itertools.count()


class SimMemory:
    """The memory of the devices."""

    def make(self, size_bytes: int, device: torch.device) -> SimBuffer:
        return SimBuffer(HostBuffer.make(size_bytes), device.index)

    def map(self, handles: Sequence[bytes], fds: list[int], sizes_bytes: Sequence[int]) -> list[SimBuffer]:
        made = []
        for handle, size_bytes in zip(handles, sizes_bytes, strict=True):
            path, index, _ = handle.split()
            made.append(SimBuffer(HostBuffer.map(os.open(path, os.O_RDWR), size_bytes), int(index)))
        return made

    def name(self, device: torch.device) -> str:
        return str(device.index)

    def find(self, name: str) -> torch.device:
        return torch.device(sim_device.NAME, int(name))

    def free_bytes(self, device: torch.device) -> int | None:
        return torch.accelerator.get_memory_info(device)[0]
