"""The coordinator's connections: to ranks that have joined, and to strangers, which have not said yet who they are.

Ranks below `world` call for updates; those from there on are agents, of which any number may join.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import TypeAlias

from treadle.host.waker import Waker
from treadle.update.protocol.control import Proceed, ToCoordinator
from treadle.update.protocol.update_messages import PROTOCOL, Hello
from treadle.wire.errors import WireError, WrongKeyError
from treadle.wire.link import Link
from treadle.wire.listeners import Listener

RankLink: TypeAlias = Link[ToCoordinator]


class RankLinks:
    """Connections by rank. Used by the coordinator's thread only, except `wake`.

    `turned_away` says who came with another key, for the error about ranks that are missing.
    """

    def __init__(self, listener: Listener[RankLink], world: int) -> None:
        self.listener, self.world = listener, world
        self.turned_away = ""
        self._ranks: dict[int, RankLink] = {}
        self._rank_of: dict[RankLink, int] = {}
        self._is_called = False
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(listener.server, selectors.EVENT_READ, None)
        self._selector.register(self._waker, selectors.EVENT_READ, None)

    def __iter__(self) -> Iterator[int]:
        """Ranks that have joined."""
        return iter(list(self._ranks))

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks

    def peer(self, rank: int) -> str:
        """A rank's process, for people."""
        return self._ranks[rank].peer

    def pid(self, rank: int) -> int:
        """A rank's process, 0 where it is on another host."""
        return self._ranks[rank].pid

    def ready(self, timeout_s: float | None) -> list[RankLink]:
        """Wait for messages; connections that have any."""
        keys = [key for key, _ in self._selector.select(timeout_s)]
        self._is_called = any(key.fileobj is self.listener.server for key in keys)
        return [key.data for key in keys if key.data is not None]

    def wake(self) -> None:
        """End a wait in `ready`, from another thread."""
        self._waker.wake()

    def is_open(self, link: RankLink) -> bool:
        """True until the connection is dropped."""
        return link in self._rank_of or link in self.listener.strangers

    def rank_of(self, link: RankLink) -> int | None:
        """Return the rank that joined over this connection; None for a stranger."""
        return self._rank_of.get(link)

    def accept(self) -> None:
        """Take a new connection, if `ready` saw one."""
        if not self._is_called:
            return
        link = self.listener.accept()
        if link is not None:
            self._selector.register(link.connection, selectors.EVENT_READ, link)

    def join(self, link: RankLink, hello: ToCoordinator) -> int:
        """Take a stranger's first message; the rank that it is.

        Raises WireError where there is no place for it, and OSError where it is gone; then it has not joined.
        """
        if not isinstance(hello, Hello) or (hello.protocol, hello.role, hello.world) != (PROTOCOL, "join", self.world):
            began = f"a connection begins with Hello, to join, of protocol {PROTOCOL} and world {self.world}"
            raise WireError(f"{began}, got {hello}")
        if hello.rank < 0 or hello.rank in self._ranks:
            raise WireError(f"there is no place for update rank {hello.rank} of {self.world}")
        link.trust()
        link.send(Proceed(0, "enter"), timeout_s=0)
        self.listener.discard(link)
        self._ranks[hello.rank], self._rank_of[link] = link, hello.rank
        link.peer = f"process {hello.pid}" + (f" on {hello.host}" if not link.pid else "")
        if len(self._ranks) >= self.world and all(rank in self._ranks for rank in range(self.world)):
            self.turned_away = ""
        return hello.rank

    def drop(self, link: RankLink, error: Exception) -> int | None:
        """Close a connection; the rank that is lost by it, None for a stranger, which gets the reason.

        A peer with another key cannot read it, and any message shows it, too, that the keys differ.
        """
        self._selector.unregister(link.connection)
        rank = self.rank_of(link)
        if isinstance(error, WrongKeyError):
            self.turned_away = f"; {link.peer} was turned away: {error}"
        if rank is not None:
            del self._ranks[rank], self._rank_of[link]
        else:
            self.listener.discard(link)
            link.refuse(error, timeout_s=0)
        link.close()
        return rank

    def tell(self, rank: int, body: bytes, timeout_s: float) -> None:
        """Send an encoded message, without waiting for the rank. One that is gone is heard of by `ready`."""
        if rank in self._ranks:
            self._ranks[rank].send_soon(body, timeout_s=timeout_s)

    @property
    def deadlines(self) -> list[float]:
        """When strangers must have said who they are, on the monotonic clock."""
        return list(self.listener.strangers.values())

    def close(self) -> None:
        """Close all connections and the listener."""
        for link in (*self._ranks.values(), *self.listener.strangers):
            link.close()
        self.listener.close()
        self._selector.close()
        self._waker.close()
