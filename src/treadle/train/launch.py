"""Joins the processes that torchrun started; a process started without it is a world of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from treadle.train.config import TrainConfig


def rank_of_launch() -> int:
    """Return this process's rank as torchrun says it, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


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


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("training.device is cuda, but torch finds no GPU here; use auto or cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
