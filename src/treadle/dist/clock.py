"""One clock for all ranks: the offset between hosts' clocks, from the quickest of several round trips."""

from __future__ import annotations

import hashlib
from pathlib import Path
from time import perf_counter_ns

import torch

from treadle.dist.groups import Group
from treadle.dist.streams import HOST_MEMORY

_PINGS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_number() -> int:
    """Return a number for this host since its start, 0 if unknown. Ranks with the same number share a clock."""
    boot = _BOOT.read_bytes() if _BOOT.exists() else b""
    return int.from_bytes(hashlib.sha256(boot).digest()[:7], "big") if boot else 0


def clock_offset(group: Group) -> int:
    """Return the nanoseconds to add to this rank's times for the clock of the group's first rank. A collective.

    The group is one of CPUs: there a send or receive has ended when its call returns.
    """
    hosts = group.all_gather(torch.tensor([host_number()], dtype=torch.int64, device=HOST_MEMORY))
    offset = 0
    for other in range(1, len(hosts)):
        if bool(hosts[other] == hosts[0]) and int(hosts[0]) != 0:
            continue
        if group.group_rank == 0:
            _ask(group, other)
        elif group.group_rank == other:
            offset = _answer(group)
    return offset


def _ask(group: Group, other: int) -> None:
    """Asks for the other's time _PINGS times, and sends it the offset of its clock by the quickest answer."""
    message = torch.zeros(1, dtype=torch.int64, device=HOST_MEMORY)
    answers = []
    for _ in range(_PINGS):
        asked = perf_counter_ns()
        group.send(message, other)
        group.recv(message, other)
        took = perf_counter_ns() - asked
        answers.append((took, asked + took // 2 - int(message)))
    group.send(torch.tensor([min(answers)[1]], dtype=torch.int64, device=HOST_MEMORY), other)


def _answer(group: Group) -> int:
    message = torch.zeros(1, dtype=torch.int64, device=HOST_MEMORY)
    for _ in range(_PINGS):
        group.recv(message, 0)
        message.fill_(perf_counter_ns())
        group.send(message, 0)
    group.recv(message, 0)
    return int(message)
