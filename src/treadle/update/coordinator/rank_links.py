"""The coordinator's connections: to ranks that have joined, and to strangers, which have not said yet who they are."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn, TypeAlias

from treadle.host.waker import Waker
from treadle.update.protocol.control import Fault, Join, Joined, Stop, ToCoordinator
from treadle.update.protocol.update_messages import PROTOCOL
from treadle.wire.errors import WireError, WrongKeyError
from treadle.wire.link import HELLO_S, PAUSE_S, Link
from treadle.wire.listeners import Listener

RankLink: TypeAlias = Link[ToCoordinator]

MOST_STRANGERS = 64
"""Strangers that are held at once, and one for each rank; one more closes the oldest. A rank among them calls again."""


class RankLinks:
    """Connections by rank. Used by the coordinator's thread only, except `wake`.

    `turned_away` says who came with another key, for the error about ranks that are missing.
    """

    def __init__(self, listener: Listener, world: int) -> None:
        self.listener, self.world = listener, world
        self.turned_away = ""
        self._ranks: dict[int, RankLink] = {}
        self._strangers: dict[RankLink, float] = {}
        """When each of them is dropped, unless it says who it is."""
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
        return link in self._strangers or link in self._ranks.values()

    def rank_of(self, link: RankLink) -> int | None:
        """Return the rank that joined over this connection; None for a stranger."""
        return next((rank for rank, other in self._ranks.items() if other is link), None)

    def accept(self) -> None:
        """Take a new connection, if `ready` saw one. Hear its messages first: this may close the oldest stranger."""
        if not self._is_called:
            return
        try:
            link: RankLink | None = self.listener.accept(ToCoordinator)
        except OSError:  # no descriptors left, for now
            time.sleep(PAUSE_S)
            return
        if link is None:
            return
        if len(self._strangers) >= self.world + MOST_STRANGERS:
            self.drop(next(iter(self._strangers)))
        self._strangers[link] = time.monotonic() + HELLO_S
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def join(self, link: RankLink, join: ToCoordinator) -> int:
        """Take a stranger's first message; the rank that it is.

        Raises WireError where there is no place for it, and OSError where it is gone; then it has not joined.
        """
        if not isinstance(join, Join) or (join.protocol, join.world) != (PROTOCOL, self.world):
            self._refuse(
                link, f"a connection begins with Join of protocol {PROTOCOL} and world {self.world}, got {join}"
            )
        if not 0 <= join.rank < self.world or join.rank in self._ranks:
            self._refuse(link, f"there is no place for update rank {join.rank} of {self.world}")
        link.trust()
        link.send(Joined(), timeout_s=0)
        del self._strangers[link]
        self._ranks[join.rank] = link
        link.peer = f"process {join.pid}" + (f" on {join.host}" if not link.pid else "")
        if len(self._ranks) == self.world:
            self.turned_away = ""
        return join.rank

    def turn_away(self, link: RankLink, error: WrongKeyError) -> None:
        """Answer a peer with another key: any message shows it, too, that the keys differ."""
        self.turned_away = f"; {link.peer} was turned away: {error}"
        _say_why(link, str(error))

    def _refuse(self, link: RankLink, text: str) -> NoReturn:
        _say_why(link, text)
        raise WireError(text)

    def drop(self, link: RankLink) -> int | None:
        """Close a connection; the rank that is lost by it, None for a stranger."""
        self._selector.unregister(link.connection)
        rank = self.rank_of(link)
        self._strangers.pop(link, None)
        if rank is not None:
            del self._ranks[rank]
        link.close()
        return rank

    def tell(self, rank: int, body: bytes, timeout_s: float) -> None:
        """Send an encoded message. A rank that is gone is heard of by `ready`."""
        with suppress(OSError):
            self._ranks[rank].send_encoded(body, timeout_s=timeout_s)

    @property
    def deadlines(self) -> list[float]:
        """When strangers must have said who they are, on the monotonic clock."""
        return list(self._strangers.values())

    def drop_late_strangers(self) -> None:
        """Close connections that said nothing within HELLO_S."""
        for link in [link for link, until in self._strangers.items() if time.monotonic() > until]:
            self.drop(link)

    def close(self) -> None:
        """Close all connections and the listener."""
        for link in (*self._ranks.values(), *self._strangers):
            link.close()
        self.listener.close()
        self._selector.close()
        self._waker.close()


def _say_why(link: RankLink, text: str) -> None:
    with suppress(OSError):
        link.send(Stop(0, Fault(0, "the coordinator", "enter", -1, text), committed=False), timeout_s=0)
