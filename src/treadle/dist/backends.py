"""Which of torch's backends serves a device, in the world as `init_process_group` made it.

Tensors on the CPU always go by gloo, which Treadle makes itself, beside any backend of the world: control messages do
so on every device. A dry run's world is "fake" for all devices.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FAKE, GLOO, NCCL = "fake", "gloo", "nccl"

_ON_HOST = ("cpu", "meta")
"""Types of devices whose tensors gloo carries. Meta tensors are only in dry runs, and in groups that move nothing."""


def is_dry() -> bool:
    """True in a world of torch's fake backend, which moves nothing."""
    return FAKE in _world().values()


def backend_of(device: torch.device) -> str:
    """Return the name of the backend that carries tensors of `device`. Raises ValueError if the world has none."""
    world = _world()
    if FAKE in world.values():
        return FAKE
    if device.type in _ON_HOST:
        return GLOO
    backend = world.get(device.type)
    if backend is None or backend == GLOO:  # gloo sends no tensor that is not the CPU's
        raise ValueError(
            f"the tensors are on {device.type}, and the process group was made with "
            f"{dist.get_backend_config()!r}, which has no backend that sends them; {_way_out(device)}"
        )
    return backend


def default_backend(device: torch.device) -> str:
    """Return torch's own choice for a device, whatever the world was made with."""
    if is_dry():
        return FAKE
    if device.type in _ON_HOST:
        return GLOO
    chosen = _chosen(device)
    if chosen is None:
        raise ValueError(f"torch knows no backend that sends tensors on {device.type}; {_way_out(device)}")
    return chosen


def _world() -> dict[str, str]:
    """Return the backend of each type of device, as the world has them; none where there is no world of torch's."""
    if not dist.is_initialized():
        return {}
    pairs = (pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    return {device: backend.lower() for device, backend in pairs}


def _chosen(device: torch.device) -> str | None:
    try:
        chosen = str(dist.get_default_backend_for_device(device.type))
    except ValueError:
        return None
    return chosen if chosen != GLOO else None


def _way_out(device: torch.device) -> str:
    chosen = _chosen(device)
    if chosen is None:
        return "move the modules to a device that has one, for example cpu or cuda"
    return f'make it with init_process_group("cpu:gloo,{device.type}:{chosen}")'
