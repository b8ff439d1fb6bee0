"""Which type of device the buffers of an attempt are on: that of what is sent and served, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from treadle.host.errors import TreadleError

Why = Literal["is given", "serves on", "sends from", ""]


class BufferDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank can have its buffers: torch's type of the device, and the backend that sends from it.

    `why` is empty where the rank's elements are on the host, or it has none: it then uses what the others do, as far as
    its process has an `accelerator` of that type.
    """

    type: str = "cpu"
    backend: str = "gloo"
    why: Why = ""
    accelerator: str = ""

    def __str__(self) -> str:
        how = self.why if self.why else "has"
        return f"{how} {self.type} ({self.backend})"


class DifferentDevicesError(TreadleError, ValueError):
    """Two ranks would make different process groups; `ranks` are both."""

    def __init__(self, ranks: tuple[int, int], devices: tuple[BufferDevice, BufferDevice]) -> None:
        told = ", ".join(f"rank {rank} {device}" for rank, device in zip(ranks, devices, strict=True))
        super().__init__(
            f"{told}: they would make different process groups; have all of them on one type of device, or send "
            "through the host: Updater(..., device=torch.device('cpu')) on the ranks that call"
        )
        self.ranks = ranks


def common_device(devices: Mapping[int, BufferDevice]) -> str:
    """Return the type for all ranks. Raises DifferentDevicesError where there is none."""
    given = {rank: device for rank, device in devices.items() if device.why == "is given"}
    chosen = given or {rank: device for rank, device in devices.items() if device.why}
    if not chosen:
        return "cpu"
    first, kind = next((rank, device.type) for rank, device in chosen.items())
    for rank, device in devices.items():
        is_free = rank not in chosen and kind == "cpu"  # any rank has host memory
        if not is_free and kind not in (device.type, "" if device.why else device.accelerator):
            raise DifferentDevicesError((first, rank), (devices[first], device))
    return kind
