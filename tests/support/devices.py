"""The device that tests run on: `TREADLE_TEST_DEVICE=cuda pytest` runs the suite on GPUs, one a rank, over NCCL;
`TREADLE_TEST_DEVICE=sim` on devices made of threads, whose kernels are late by draws from `TREADLE_TEST_SEED`.

Tensors and modules that a rank makes without naming a device are on its own, and so are those that it is given; what it
returns comes to the host. A test that has more ranks than there are devices is skipped, as NCCL gives a device to one
rank only.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from treadle import sim_device

VARIABLE = "TREADLE_TEST_DEVICE"
SEED_VARIABLE = "TREADLE_TEST_SEED"
LATE_US = 300.0
DEVICE_TYPE = os.environ.get(VARIABLE, "cpu")
"""For `init_device_mesh`."""


def device_of(rank: int = 0) -> torch.device:
    """The device of a rank; for the test's own process that of rank 0."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    count = _count()
    if count == 0:
        raise pytest.UsageError(f"{VARIABLE}={DEVICE_TYPE}: torch {torch.__version__} finds no such device here")
    return torch.device(DEVICE_TYPE, rank % count)


def backend() -> str:
    """torch's backends for process groups on the device: gloo on the CPU, nccl on CUDA."""
    if DEVICE_TYPE == sim_device.NAME:
        _load_sim()
        return f"cpu:gloo,{DEVICE_TYPE}:{dist.get_default_backend_for_device(DEVICE_TYPE)}"
    return str(dist.get_default_backend_for_device(DEVICE_TYPE))


def skip_beyond_devices(world: int) -> None:
    """Skips a test that has more ranks than there are devices."""
    if DEVICE_TYPE != "cpu" and world > _count():
        pytest.skip(f"{world} ranks, and {_count()} devices of type {DEVICE_TYPE}")


def enter(rank: int) -> None:
    """Makes the rank's device the default of its process."""
    if DEVICE_TYPE != "cpu":
        device = device_of(rank)
        torch.get_device_module(DEVICE_TYPE).set_device(device)
        torch.set_default_device(device)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on this process's device."""
    return tensor.to(torch.get_default_device())


def drawn(draw: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """What `torch.randn` and its like draw from a generator of the host, on the default device."""
    return here(draw(*args, **named, device="cpu"))


def pickled(thing: Any) -> bytes:
    """`thing`, whose tensors are on the default device where it is unpickled."""
    if DEVICE_TYPE == "cpu":
        return pickle.dumps(thing)
    file = io.BytesIO()
    _Pickler(file).dump(thing)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor) or thing.is_meta:
            return NotImplemented
        host: Any = thing.detach().cpu().as_subclass(Tensor)
        return _arrived, (
            host.__reduce_ex__(pickle.HIGHEST_PROTOCOL),
            isinstance(thing, nn.Parameter),
            thing.requires_grad,
        )


def _arrived(reduced: Any, is_parameter: bool, requires_grad: bool) -> Tensor:
    made = here(reduced[0](*reduced[1]).detach())
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


@cache
def _load_sim() -> None:
    sim_device.load(seed=int(os.environ.get(SEED_VARIABLE, "0")), delay_us=LATE_US)
    from tests.support.update.sim_memory import share_buffers

    share_buffers()


def _count() -> int:
    if DEVICE_TYPE == sim_device.NAME:
        _load_sim()
    try:
        return int(torch.get_device_module(DEVICE_TYPE).device_count())
    except RuntimeError as error:
        raise pytest.UsageError(f"{VARIABLE}={DEVICE_TYPE}: {error}; give cpu, cuda or sim") from error
