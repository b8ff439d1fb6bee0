"""The IPC and H2D buffers of an update rank. They are kept from one update to the next: fresh pages are slow."""

from __future__ import annotations

import torch

from treadle.update.memory.host import Buffer, HostBuffer
from treadle.update.rank.shares import Shares


class RankBuffers:
    """`ipc` buffers receive broadcasts, `h2d` buffers hold packed buckets of this rank; its worker maps both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ipc: list[Buffer] = []
        self.h2d: list[Buffer] = []

    @property
    def all(self) -> list[Buffer]:
        """IPC buffers, then H2D buffers: a Load or Export message names a buffer by its index here."""
        return [*self.ipc, *self.h2d]

    def fit(self, shares: Shares) -> None:
        """Make buffers of the plan's number and size, unless those at hand suffice."""
        self.ipc = self._fit(self.ipc, shares.plan.num_ipc, shares.buffer_bytes)
        self.h2d = self._fit(self.h2d, shares.plan.num_h2d, shares.buffer_bytes)

    def _fit(self, held: list[Buffer], num: int, size_bytes: int) -> list[Buffer]:
        if len(held) >= num and all(buffer.size_bytes >= size_bytes for buffer in held[:num]):
            return held
        while held:
            held.pop().close()
        if self.device.type == "cuda":
            from treadle.update.memory.cuda import CudaBuffer  # only where there is a GPU

            return [CudaBuffer.make(size_bytes, self.device) for _ in range(num)]
        return [HostBuffer.make(size_bytes) for _ in range(num)]

    def free(self) -> None:
        """Close all buffers. The worker's mappings keep the memory until it unmaps them."""
        for buffer in self.all:
            buffer.close()
        self.ipc, self.h2d = [], []
