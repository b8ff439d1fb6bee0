"""The input and output of a rank's watch: its links, its listener, and a selector over them.

The transport knows nothing of losses. It hands its owner each neighbour's messages, and tells it which neighbour is
gone. The listener is closed once all expected neighbours have connected.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from treadle.host.waker import Waker
from treadle.runtime.faults.progress.progress_page import Snapshot
from treadle.runtime.faults.watch.links import Neighbour, NeighbourLink
from treadle.runtime.faults.watch.loss_messages import Goodbye, Greeting, Message, encode
from treadle.wire.errors import WireError
from treadle.wire.listeners import Listener

PARTING_S = 0.5
"""How long a rank waits at its end for neighbours to read its goodbye."""


class MessageHandler(Protocol):
    """The owner of a transport."""

    def hear(self, neighbour: Neighbour, message: Message) -> None:
        """Takes a message of a neighbour."""

    def miss(self, neighbour: Neighbour, *, died: bool) -> None:
        """Is told that a neighbour's process or connection ended, or else (not `died`) that it sent malformed bytes."""


class Transport:
    """The connections of one rank. Only `wake` may be called by other threads than the watch's."""

    def __init__(
        self,
        owner: MessageHandler,
        neighbours: Sequence[Neighbour],
        listener: Listener[NeighbourLink],
        token: bytes,
    ) -> None:
        self._owner, self._token = owner, token
        self.neighbours = {neighbour.rank: neighbour for neighbour in neighbours}
        self.met = threading.Event()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._parting = False

    def open(self, called: Mapping[int, NeighbourLink]) -> None:
        """Starts with the connections to neighbours that this rank called; the other neighbours call this rank."""
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.clear)
        self._selector.register(self._listener.server, selectors.EVENT_READ, self._accept)
        for neighbour in self.neighbours.values():
            if neighbour.page_reader is not None:
                self._selector.register(neighbour.page_reader.pidfd, selectors.EVENT_READ, self._ended_of(neighbour))
        for rank, link in called.items():
            self._take(self.neighbours[rank], link)
        self._close_listener_if_met()

    def missing(self) -> list[int]:
        """Returns the neighbours that are not connected."""
        return sorted(rank for rank, neighbour in self.neighbours.items() if neighbour.link is None)

    def wake(self) -> None:
        """Ends the current or the next `turn` at once."""
        self._waker.wake()

    def turn(self, wait_s: float) -> None:
        """Handles what comes within `wait_s`; connections before pidfds, as messages sent before a death count."""
        events = self._selector.select(wait_s)
        for key, _ in sorted(events, key=lambda event: isinstance(event[0].fileobj, int)):
            if key.fd in self._selector.get_map():  # not dropped while another event was handled
                key.data()
        for stranger, _ in self._listener.overdue():
            self._refuse(stranger)

    def spread(self, message: Message, source: Neighbour | None = None) -> None:
        """Sends a message to all neighbours but its source."""
        frame = encode(message)
        for neighbour in self.neighbours.values():
            if neighbour.link is not None and neighbour is not source:
                neighbour.link.send(frame)

    def part(self, slots: Snapshot) -> None:
        """Sends a goodbye, and waits up to PARTING_S for neighbours to hang up: a close could overtake the goodbye."""
        self._parting = True
        self.spread(Goodbye(slots))
        until = time.monotonic() + PARTING_S
        shut: set[int] = set()
        while (linked := self._linked()) and time.monotonic() < until:
            for neighbour, link in linked:
                link.flush()
                if not link.pending and neighbour.rank not in shut:
                    shut.add(neighbour.rank)
                    with suppress(OSError):
                        link.socket.shutdown(socket.SHUT_WR)
            self.turn(0.02)

    def close(self) -> None:
        """Closes all sockets and page readers."""
        for neighbour in self.neighbours.values():
            self._drop(neighbour)
        self._close_listener()
        self._selector.close()
        self._waker.close()
        for neighbour in self.neighbours.values():
            if neighbour.page_reader is not None:
                neighbour.page_reader.close()

    def _linked(self) -> list[tuple[Neighbour, NeighbourLink]]:
        return [(each, each.link) for each in self.neighbours.values() if each.link is not None]

    def _accept(self) -> None:
        link = self._listener.accept()
        if link is not None:
            self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._identify(link))

    def _identify(self, link: NeighbourLink) -> None:
        try:
            stands, greeting = link.read(), next(link.received(), None)
        except WireError:
            self._refuse(link)
            return
        if greeting is None and stands:
            return
        neighbour = None
        if isinstance(greeting, Greeting) and hmac.compare_digest(greeting.token, self._token):
            neighbour = self.neighbours.get(greeting.rank)
        if neighbour is None or neighbour.link is not None:
            self._refuse(link)
            return
        self._selector.unregister(link.socket)
        self._listener.discard(link)
        self._take(neighbour, link)
        self._close_listener_if_met()  # first: a goodbye after the greeting drops the link
        self._hand_over(neighbour, link, stands=stands)

    def _refuse(self, link: NeighbourLink) -> None:
        self._unregister(link.socket)
        self._listener.discard(link)
        link.socket.close()

    def _take(self, neighbour: Neighbour, link: NeighbourLink) -> None:
        link.trust()
        neighbour.link, neighbour.heard = link, time.monotonic()
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._read(neighbour))

    def _close_listener_if_met(self) -> None:
        if not self.missing():
            self._close_listener()
            self.met.set()

    def _close_listener(self) -> None:
        self._unregister(self._listener.server)
        self._listener.close()
        for stranger in list(self._listener.strangers):
            self._refuse(stranger)

    def _read(self, neighbour: Neighbour) -> bool:
        """Handles the messages that a neighbour has sent; False once there are no more to come."""
        link = neighbour.link
        return link is not None and self._hand_over(neighbour, link, stands=link.read())

    def _hand_over(self, neighbour: Neighbour, link: NeighbourLink, *, stands: bool) -> bool:
        try:
            messages = list(link.received())
        except WireError:
            self._drop(neighbour)
            self._owner.miss(neighbour, died=False)
            return False
        for message in [] if self._parting else messages:
            self._owner.hear(neighbour, message)
        if neighbour.left or not stands:
            self._drop(neighbour)
        if not neighbour.left and not stands and not self._parting:
            self._owner.miss(neighbour, died=True)
        return bool(messages) and neighbour.link is not None

    def _ended_of(self, neighbour: Neighbour) -> Callable[[], None]:
        def ended() -> None:
            assert neighbour.page_reader is not None
            self._unregister(neighbour.page_reader.pidfd)
            while self._read(neighbour):
                pass
            if neighbour.link is not None or not self.met.is_set():  # a child of the dead rank holds the connection
                self._drop(neighbour)
                if not neighbour.left and not self._parting:
                    self._owner.miss(neighbour, died=True)

        return ended

    def _drop(self, neighbour: Neighbour) -> None:
        link, neighbour.link = neighbour.link, None
        if link is not None:
            self._unregister(link.socket)
            link.socket.close()

    def _unregister(self, fileobj: socket.socket | int) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(fileobj)
