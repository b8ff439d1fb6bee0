"""The IPC and H2D buffers of an update rank.

Those of a host are kept from one update to the next: fresh pages are slow. Those of a device are freed, as trainer and
engine need the memory in between.
"""

from __future__ import annotations

from functools import cached_property

import torch

from treadle.dist.streams import DeviceStream, streams_of
from treadle.update.memory.ipc_buffers import Buffer, memory_of
from treadle.update.rank.shares import Shares


class RankBuffers:
    """`ipc` buffers receive broadcasts, `h2d` buffers hold packed buckets of this rank; its worker maps both."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, memory_of(device.type)
        self.ipc: list[Buffer] = []
        self.h2d: list[Buffer] = []

    @property
    def all(self) -> list[Buffer]:
        """IPC buffers, then H2D buffers: a Load or Export message names a buffer by its index here."""
        return [*self.ipc, *self.h2d]

    def fit(self, shares: Shares, more_bytes: int = 0) -> None:
        """Make buffers of the plan's number and size, each with some more bytes, unless those at hand suffice."""
        size_bytes = shares.buffer_bytes + more_bytes
        self.ipc = self._fit(self.ipc, shares.plan.num_ipc, size_bytes)
        self.h2d = self._fit(self.h2d, shares.plan.num_h2d, size_bytes)

    def _fit(self, held: list[Buffer], num: int, size_bytes: int) -> list[Buffer]:
        if len(held) >= num and all(buffer.size_bytes >= size_bytes for buffer in held[:num]):
            return held
        while held:
            held.pop().close()
        return [self.memory.make(size_bytes, self.device) for _ in range(num)]

    @cached_property
    def stream(self) -> DeviceStream | None:
        """The stream on which buckets are packed, one for all updates: the allocator caches blocks by stream."""
        streams = streams_of(self.device)
        return streams.new(self.device, "h2d") if streams is not None else None

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the device has free now; None where not measured."""
        return self.memory.free_bytes(self.device)

    def end_update(self) -> None:
        """Free the buffers of a device."""
        if streams_of(self.device) is not None:
            self.free()

    def free(self) -> None:
        """Close all buffers. The worker's mappings keep the memory until it unmaps them."""
        for buffer in self.all:
            buffer.close()
        self.ipc, self.h2d = [], []
