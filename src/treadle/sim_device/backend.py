"""Registers the device with torch."""

from __future__ import annotations

import atexit
import importlib.util
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from treadle.sim_device.build import NAME as EXTENSION
from treadle.sim_device.build import built

NAME = "sim"
BACKEND = "simccl"

_loaded: Any = None
_loading = threading.Lock()


def load(*, num_devices: int = 8, seed: int = 0, delay_us: float = 0.0, nonblocking: bool = False) -> None:
    """Compile the device where that has not been done, and register it with torch; again, it does nothing.

    A kernel starts up to `delay_us` late, drawn from `seed`. `nonblocking` communicators connect as NCCL's do under
    TORCH_NCCL_USE_COMM_NONBLOCKING=1.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _registered(num_devices, seed, delay_us, nonblocking)


def _registered(num_devices: int, seed: int, delay_us: float, nonblocking: bool) -> Any:
    before = torch._C._get_privateuse1_backend_name()
    if before not in ("privateuseone", NAME):
        raise ValueError(f"torch has one place for a device of others, and {before!r} is in it; start a new process")
    spec = importlib.util.spec_from_file_location(EXTENSION, built())
    assert spec is not None
    assert spec.loader is not None
    extension: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    extension.configure(num_devices, seed, delay_us, nonblocking)
    rename_privateuse1_backend(NAME)
    untyped: Any = torch
    untyped._register_device_module(NAME, _device_module(extension))
    generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, partial(_make_backend, extension), devices=[NAME])
    atexit.register(extension.leave)
    return extension


def is_loaded() -> bool:
    """Return whether this process has the device."""
    return _loaded is not None


def sleep(milliseconds: float) -> None:
    """Launch a kernel that occupies the current stream for so long; below 0, one that never ends."""
    _loaded.sleep(milliseconds)


def in_host_memory(host: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of a device that has the memory of one of the host, which other processes may share."""
    made: torch.Tensor = _loaded.in_host_memory(host, index)
    return made


def take_waits() -> dict[str, int]:
    """Return how often the host waited for the device in calls that do not say so, by operator, since the last call."""
    waits: dict[str, int] = _loaded.take_implicit_waits()
    return waits


@contextmanager
def forbid_waits() -> Iterator[None]:
    """Have such a wait raise, as `torch.cuda.set_sync_debug_mode("error")` does."""
    before = _loaded.forbid_implicit_waits(True)
    try:
        yield
    finally:
        _loaded.forbid_implicit_waits(before)


def _index(device: Any) -> int:
    """Return the number of a device that is given as torch's modules of devices take it."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return index if index is not None else torch.accelerator.current_device_index()


def _device_module(extension: Any) -> types.ModuleType:
    """Return what torch looks up in `torch.sim`."""
    generators = tuple(extension.default_generator(at) for at in range(extension.device_count()))
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = extension.is_forked
    module.device_count = extension.device_count
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(_index(device))
    module.device = lambda device: torch.accelerator.device_index(_index(device))
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream if stream is not None else nullcontext()
    module.default_generators = generators
    module.manual_seed = lambda seed: generators[_index(None)].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.get_rng_state = lambda device=NAME: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=NAME: generators[_index(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="a device of threads", total_memory=torch.accelerator.get_memory_info(_index(device))[1]
    )
    for name in ("empty_cache", "memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats"):
        setattr(module, name, getattr(torch.accelerator, name))
    module.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
    return module  # type: ignore[no-any-return]


def _make_backend(extension: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    def connect(name: str, ranks: list[int]) -> Any:
        own = PrefixStore(f"{BACKEND}/{name}", store)
        return dist.ProcessGroupGloo(own, ranks.index(rank), len(ranks), timeout)

    return extension.SimCcl(connect, rank, size)
