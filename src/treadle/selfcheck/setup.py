"""What is checked, and the machine it is checked on."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import treadle
from treadle import sim_device
from treadle.selfcheck.check_report import SkippedError

SIM_LATE_US = 300.0
"""The longest time by which a kernel of the device of threads starts late."""


@dataclass(frozen=True)
class Setup:
    """The device, how many ranks, how much. `device_type` None: the accelerator if there is one, else the CPU."""

    num_ranks: int = 4
    quick: bool = False
    device_type: str | None = None
    deadline_s: float = 120.0
    """Seconds of a single wait in a rank, and of a whole check once its processes run twice that."""

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"ranks are 2 or more, as a pipeline of one sends nothing, got {self.num_ranks}")
        if self.device_type == sim_device.NAME:
            sim_device.load(num_devices=max(8, self.num_ranks), delay_us=SIM_LATE_US)
        if self.kind != "cpu" and (self.accelerator is None or self.accelerator.type != self.kind):
            here = self.accelerator.type if self.accelerator is not None else "none"
            raise ValueError(
                f"device {self.kind!r} is not here (accelerator: {here}); give cpu or sim, or leave it out"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Make it again in the other process, which then has the device, too."""
        return Setup, (self.num_ranks, self.quick, self.device_type, self.deadline_s)

    @cached_property
    def accelerator(self) -> torch.device | None:
        """Returns torch's accelerator, None without one."""
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

    @cached_property
    def kind(self) -> str:
        """Returns the type of the ranks' devices."""
        if self.device_type is not None:
            return self.device_type
        return self.accelerator.type if self.accelerator is not None else "cpu"

    @property
    def backend(self) -> str:
        """Returns torch's backend for process groups of these devices."""
        return str(dist.get_default_backend_for_device(self.kind))

    @property
    def world_backend(self) -> str:
        """Returns the backends of a world: the device's, and gloo for control messages."""
        return self.backend if self.kind == "cpu" else f"cpu:gloo,{self.kind}:{self.backend}"

    @property
    def dtype(self) -> torch.dtype:
        """Returns the precision in which gradients are compared: float64 where the device has it."""
        return torch.float64 if self.kind in ("cpu", "cuda", sim_device.NAME) else torch.float32

    @property
    def tolerance(self) -> float:
        """Returns how far a gradient may be from that of one process, of the largest of its entries."""
        return 1e-10 if self.dtype is torch.float64 else 1e-3

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, rank)

    def need_ranks(self, num: int) -> None:
        """Skips a check that needs more ranks than there are devices."""
        if self.kind == "cpu":
            return
        count = torch.accelerator.device_count()
        if num > count:
            raise SkippedError(
                f"{num} ranks need a device each, and there are {count} of type {self.kind}; give --ranks {count}, "
                "or --device cpu"
            )


def describe_machine() -> dict[str, Any]:
    """Return versions and devices."""
    return {
        "treadle": treadle.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(),
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)],
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "executable": sys.executable,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": _devices(),
    }


def _nccl() -> str | None:
    if not dist.is_nccl_available():
        return None
    from torch.cuda import nccl  # the version has no form for all devices

    version = nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _devices() -> list[dict[str, Any]]:
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    found = []
    for index in range(torch.accelerator.device_count()):
        about = module.get_device_properties(index)
        found.append(
            {
                "type": str(kind),
                "index": index,
                "name": str(getattr(about, "name", kind)),
                "memory_bytes": int(getattr(about, "total_memory", 0)),
            }
        )
    return found
