"""How ranks find each other: contacts exchanged once over the given rings, after which no store is needed.

A rank has a connection to the rank before and after it
in each ring: four at most on a mesh of two dimensions, whatever its size. Messages go round both ways.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

import msgspec


class Contact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


def beside(ranks: Sequence[int], rank: int) -> set[int]:
    """Returns the ranks before and after `rank` in the ring of `ranks`."""
    at = list(ranks).index(rank)
    return {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {rank}


def exchange(
    rings: Sequence[Sequence[int]], own: Contact, gather: Callable[[str, Sequence[int]], Sequence[str]]
) -> dict[int, Contact]:
    """Gathers contacts over all rings, and returns those of this rank's neighbours.

    `gather(text, ranks)` returns the texts of `ranks`, all of which call it.
    """
    neighbours: dict[int, Contact] = {}
    text = msgspec.json.encode(own).decode()
    for ranks in rings:
        texts = dict(zip(ranks, gather(text, ranks), strict=True))
        for rank in beside(ranks, own.rank):
            neighbours[rank] = msgspec.json.decode(texts[rank], type=Contact)
            _refuse_loopback(own, neighbours[rank])
    return neighbours


def _refuse_loopback(one: Contact, other: Contact) -> None:
    for contact in (one, other):
        if one.network != other.network and ipaddress.ip_address(contact.address).is_loopback:
            raise ValueError(
                f"ranks {one.rank} and {other.rank} are on different networks, but rank {contact.rank} has the address "
                f"{contact.address}, which no other host can reach; give it another with address="
            )
