"""How ranks find each other: cards exchanged once over the given groups, after which no store is needed.

In each group the ranks form a ring, in the order of the group. A rank has a connection to the rank before and after it
in each ring: four at most on a mesh of two dimensions, whatever its size, and news goes round both ways.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_CARD = struct.Struct("!I46sHIi16s16s16s")


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a rank is called and how it is known: `host` is its host and pid namespace, `network` its network's."""

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
        """What its page is marked with."""
        return int.from_bytes(self.token[:8], "little", signed=True)

    def pack(self) -> bytes:
        """The card in a fixed number of bytes."""
        address = self.address.encode()
        head = (self.rank, address, self.port, self.pid, self.progress_fd)
        return _CARD.pack(*head, self.token, self.host, self.network)

    @classmethod
    def unpack(cls, data: bytes) -> Contact:
        """The card that was packed."""
        rank, address, *rest = _CARD.unpack(data)
        return cls(rank, address.rstrip(b"\0").decode(), *rest)


class GatherGroup(Protocol):
    """Ranks that can gather: their numbers in the world, in the order of the ring."""

    @property
    def ranks(self) -> list[int]:
        """The members."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in the order of `ranks`."""
        ...


def beside(ranks: Sequence[int], rank: int) -> set[int]:
    """The ranks before and after `rank` in the ring of `ranks`."""
    at = list(ranks).index(rank)
    return {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {rank}


def exchange(groups: Sequence[GatherGroup], card: Contact, device: torch.device) -> dict[int, Contact]:
    """The cards of this rank's neighbours in all rings."""
    neighbours: dict[int, Contact] = {}
    own = torch.tensor(list(card.pack()), dtype=torch.uint8, device=device)
    for group in groups:
        if len(group.ranks) == 1:
            continue
        gathered = group.all_gather(own)
        for rank in beside(group.ranks, card.rank):
            other = Contact.unpack(bytes(gathered[group.ranks.index(rank)].tolist()))
            _refuse_loopback(card, other)
            neighbours[rank] = other
    return neighbours


def _refuse_loopback(one: Contact, other: Contact) -> None:
    for card in (one, other):
        if one.network != other.network and ipaddress.ip_address(card.address).is_loopback:
            raise ValueError(
                f"ranks {one.rank} and {other.rank} are on different networks, but rank {card.rank} has the address "
                f"{card.address}, which no other host can reach; give it another with address="
            )
