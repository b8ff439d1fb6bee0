"""How ranks find each other: contacts exchanged once over the given groups, after which no store is needed.

In each group the ranks form a ring, in the order of the group. A rank has a connection to the rank before and after it
in each ring: four at most on a mesh of two dimensions, whatever its size. Messages go round both ways.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from treadle.dist.streams import HOST_MEMORY

_CONTACT = struct.Struct("!I46sHIi16s16s16s")


@dataclass(frozen=True, slots=True)
class Contact:
    """How a rank is reached and identified: `host` is its host and pid namespace, `network` its network namespace."""

    rank: int
    address: str
    port: int
    pid: int
    progress_fd: int
    token: bytes
    host: bytes
    network: bytes

    @property
    def mark(self) -> int:
        """The mark on its progress page."""
        return int.from_bytes(self.token[:8], "little", signed=True)

    def pack(self) -> bytes:
        """Returns the contact in a fixed number of bytes, as gathering over a group needs it."""
        address = self.address.encode()
        head = (self.rank, address, self.port, self.pid, self.progress_fd)
        return _CONTACT.pack(*head, self.token, self.host, self.network)

    @classmethod
    def unpack(cls, data: bytes) -> Contact:
        """Returns the contact that `pack` packed."""
        rank, address, *rest = _CONTACT.unpack(data)
        return cls(rank, address.rstrip(b"\0").decode(), *rest)


class GatherGroup(Protocol):
    """A group of ranks that can gather."""

    @property
    def ranks(self) -> list[int]:
        """The members' numbers in the world, in the order of the ring."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every member's tensor, in the order of `ranks`."""
        ...


def beside(ranks: Sequence[int], rank: int) -> set[int]:
    """Returns the ranks before and after `rank` in the ring of `ranks`."""
    at = list(ranks).index(rank)
    return {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {rank}


def exchange(groups: Sequence[GatherGroup], own: Contact) -> dict[int, Contact]:
    """Gathers contacts over all groups, and returns those of this rank's neighbours in the rings."""
    neighbours: dict[int, Contact] = {}
    packed = torch.tensor(list(own.pack()), dtype=torch.uint8, device=HOST_MEMORY)
    for group in groups:
        if len(group.ranks) == 1:
            continue
        gathered = group.all_gather(packed)
        for rank in beside(group.ranks, own.rank):
            other = Contact.unpack(bytes(gathered[group.ranks.index(rank)].tolist()))
            _refuse_loopback(own, other)
            neighbours[rank] = other
    return neighbours


def _refuse_loopback(one: Contact, other: Contact) -> None:
    for contact in (one, other):
        if one.network != other.network and ipaddress.ip_address(contact.address).is_loopback:
            raise ValueError(
                f"ranks {one.rank} and {other.rank} are on different networks, but rank {contact.rank} has the address "
                f"{contact.address}, which no other host can reach; give it another with address="
            )
