"""Joins the processes that torchrun started; a process started without it is a world of one."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from treadle.train.run_config import TrainConfig

GPU_SETTINGS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""The settings of a run on GPUs where the user gives none. Rows of experts differ in size in each step, which splits
the caching allocator's segments; and a rank has more streams than the default of 8 hardware queues."""

_FORMER = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}

_COMMON_S = 2.0
"""How long a rank that ends with an error waits for rank 0's."""


def rank_of_launch() -> int:
    """Return this process's rank as torchrun sets it, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def is_own_error(text: str) -> bool:
    """Return whether this rank has to print the error it ends with, as rank 0 does not: it has none, or another one.

    Ranks without a process group cannot ask: there the first of each node prints.
    """
    if not dist.is_initialized():
        return rank_of_launch() > 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0
    store, key, end_s = _get_default_store(), "treadle/train/error of rank 0", time.monotonic() + _COMMON_S
    try:
        if dist.get_rank() == 0:
            store.set(key, text)
            return False
        while not store.check([key]):  # a wait that ends in vain would print torch's warnings
            if time.monotonic() > end_s:
                return True
            time.sleep(0.02)
        return store.get(key).decode() != text
    except RuntimeError:  # rank 0 is gone with the store
        return True


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    rank: int
    size: int
    device: torch.device
    restart: int = 0
    """How often torchrun has restarted them."""

    own_group: bool = True
    """Whether the process group was made here, and is to be given back."""

    def leave(self) -> None:
        """Give the process group back, if it was made here."""
        if self.own_group:
            leave_world()


def leave_world() -> None:
    """Give the default process group back, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join_world(config: TrainConfig) -> World:
    """Make the default process group, or take the one that is there.

    torchrun keeps one store for all restarts of a run, in which the keys of the processes before would mislead the
    new ones: each restart has a prefix of its own.
    """
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if config.training.device != "cpu":
        set_for_gpus(os.environ)
    device = _device(config.training.device)
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), device, restart, own_group=False)
    timeout = timedelta(seconds=config.parallel.deadline_s)
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    else:
        store, rank, size = HashStore(), 0, 1
    store = PrefixStore(f"treadle/restart {restart}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, device, restart)


def set_for_gpus(environment: MutableMapping[str, str]) -> None:
    """Set GPU_SETTINGS where neither they nor their former names are set."""
    for name, value in GPU_SETTINGS.items():
        if _FORMER.get(name, name) not in environment:
            environment.setdefault(name, value)


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("training.device is cuda, but torch finds no GPU here; use auto or cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
