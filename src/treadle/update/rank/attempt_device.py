"""The device of a rank's buffers in an attempt: its worker's, or that of what it sends, or the one that was given."""

from __future__ import annotations

from typing import Any

import torch

from treadle.dist.backends import default_backend
from treadle.dist.streams import HOST_MEMORY
from treadle.update.memory.ipc_buffers import MEMORIES, find
from treadle.update.protocol.buffer_device import BufferDevice, Why
from treadle.update.protocol.update_messages import Status
from treadle.update.rank.source import Source, WeightSource


def own_device(device: torch.device) -> torch.device:
    """Return the device with its index: a group is made in a thread, whose current device is the first one."""
    if device.type == HOST_MEMORY.type or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


class AttemptDevice:
    """The device that this rank has reason to use. Raises ValueError where the worker's is not visible here."""

    def __init__(self, given: torch.device | None, status: Status | None, source: WeightSource | None) -> None:
        self.why: Why = ""
        self.device = HOST_MEMORY
        sent = _device_of(source)
        if given is not None:
            self.why, self.device = "is given", given
        elif status is not None:
            self.why, self.device = "serves on", find(status.device)
        elif sent.type in MEMORIES and sent.type != HOST_MEMORY.type:
            self.why, self.device = "sends from", own_device(sent)

    @property
    def told(self) -> BufferDevice:
        """The device as the other ranks learn of it."""
        found = _accelerator()
        return BufferDevice(self.device.type, default_backend(self.device), self.why, found.type if found else "")

    def of_type(self, kind: str) -> torch.device:
        """Return this rank's device of a type that all ranks can use."""
        if kind == self.device.type:
            return self.device
        found = _accelerator() if kind != HOST_MEMORY.type else None
        return own_device(found) if found is not None else HOST_MEMORY


def _device_of(source: WeightSource | None) -> torch.device:
    """The device of a source's tensors; elements that are made or read when they are asked for have none."""
    held: Any = source.held.values() if isinstance(source, Source) else ()
    return next((tensor.device for tensor in held), HOST_MEMORY)


def _accelerator() -> torch.device | None:
    """The kind of accelerator of this process, if buffers can be on it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in MEMORIES else None
