"""What goes in and out over a rank's links: a selector, a door, and who may come through it.

It knows nothing of losses: it tells its owner what was heard from whom, and who is gone.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from treadle.runtime.faults.progress.page import Snapshot
from treadle.runtime.faults.watch.links import MOST_STRANGERS, Neighbour, NeighbourLink, PendingConnection, make_ready
from treadle.runtime.faults.watch.messages import Frames, Goodbye, MalformedError, Message, encode

PARTING_S = 0.5
"""How long a goodbye may take."""


class MessageHandler(Protocol):
    """Who is told."""

    def hear(self, neighbour: Neighbour, message: Message) -> None:
        """A neighbour said something."""

    def miss(self, neighbour: Neighbour, *, died: bool) -> None:
        """A neighbour's process ended or its connection did; or else it sent what is no message."""


class Transport:
    """The connections of one rank. All but `wake` and `forget` is for the watch's thread."""

    def __init__(
        self, owner: MessageHandler, neighbours: Sequence[Neighbour], door: socket.socket, token: bytes
    ) -> None:
        self._owner, self._token = owner, token
        self.neighbours = {neighbour.rank: neighbour for neighbour in neighbours}
        self.met = threading.Event()
        self._door: socket.socket | None = door
        self._strangers: dict[socket.socket, PendingConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._parting = False

    def open(self, called: Mapping[int, socket.socket]) -> None:
        """Begins, with the connections to the neighbours that this rank called; the others come through the door."""
        self._selector.register(self._waker, selectors.EVENT_READ, lambda: os.eventfd_read(self._waker))
        if self._door is not None:
            self._selector.register(self._door, selectors.EVENT_READ, self._answer_door)
        for neighbour in self.neighbours.values():
            if neighbour.onlooker is not None:
                self._selector.register(neighbour.onlooker.pidfd, selectors.EVENT_READ, self._ended_of(neighbour))
        for rank, connection in called.items():
            self._take(self.neighbours[rank], NeighbourLink(connection, Frames()))
        self._shut_door_if_met()

    def missing(self) -> list[int]:
        """The neighbours that are not connected."""
        return sorted(rank for rank, neighbour in self.neighbours.items() if neighbour.link is None)

    def wake(self) -> None:
        """Ends the current or next `turn` at once."""
        with suppress(OSError):  # closed: nobody is left to wake
            os.eventfd_write(self._waker, 1)

    def turn(self, wait_s: float) -> None:
        """Handles what comes within `wait_s`. Connections before pidfds: what a rank said before it died counts."""
        events = self._selector.select(wait_s)
        for key, _ in sorted(events, key=lambda event: isinstance(event[0].fileobj, int)):
            if key.fd in self._selector.get_map():  # else dropped while another event was handled
                key.data()

    def spread(self, message: Message, source: Neighbour | None = None) -> None:
        """Sends a message to all neighbours but the one that it came from."""
        frame = encode(message)
        for neighbour in self.neighbours.values():
            if neighbour.link is not None and neighbour is not source:
                neighbour.link.send(frame)

    def part(self, slots: Snapshot) -> None:
        """Says goodbye, and waits a moment for the neighbours to hang up, lest the close overtake the goodbye."""
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
        """Closes everything."""
        for neighbour in self.neighbours.values():
            self._drop(neighbour)
        self._shut_door()
        self._selector.close()
        os.close(self._waker)
        self._waker = -1
        for neighbour in self.neighbours.values():
            if neighbour.onlooker is not None:
                neighbour.onlooker.close()

    def forget(self) -> None:
        """In a forked child: closes its copies, which would keep connections open beyond this rank's death.

        Nothing is unregistered, as the kernel's part of the selector is the parent's too.
        """
        for _, link in self._linked():
            link.socket.close()
        if self._door is not None:
            self._door.close()

    def _linked(self) -> list[tuple[Neighbour, NeighbourLink]]:
        return [(each, each.link) for each in self.neighbours.values() if each.link is not None]

    def _answer_door(self) -> None:
        assert self._door is not None
        with suppress(OSError):  # the caller is gone already
            connection, _ = self._door.accept()
            make_ready(connection)
            if len(self._strangers) >= MOST_STRANGERS:
                self._refuse(next(iter(self._strangers.values())))
            stranger = self._strangers[connection] = PendingConnection(connection)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(stranger))

    def _greet(self, stranger: PendingConnection) -> None:
        hello, rest, stays = stranger.identify(self._token)
        neighbour = self.neighbours.get(hello.rank) if hello is not None else None
        if not stays or (hello is not None and (neighbour is None or neighbour.link is not None)):
            self._refuse(stranger)
        elif neighbour is not None:
            self._selector.unregister(stranger.socket)
            del self._strangers[stranger.socket]
            self._take(neighbour, NeighbourLink(stranger.socket, stranger.frames))
            for message in rest:
                self._owner.hear(neighbour, message)
            self._shut_door_if_met()

    def _refuse(self, stranger: PendingConnection) -> None:
        self._unregister(stranger.socket)
        self._strangers.pop(stranger.socket, None)
        stranger.socket.close()

    def _take(self, neighbour: Neighbour, link: NeighbourLink) -> None:
        neighbour.link, neighbour.heard = link, time.monotonic()
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._read(neighbour))

    def _shut_door_if_met(self) -> None:
        if not self.missing():
            self._shut_door()
            self.met.set()

    def _shut_door(self) -> None:
        if self._door is not None:
            self._unregister(self._door)
            self._door.close()
            self._door = None
        for stranger in list(self._strangers.values()):
            self._refuse(stranger)

    def _read(self, neighbour: Neighbour) -> bool:
        """Takes what a neighbour has sent; False once there is no more to come."""
        if neighbour.link is None:
            return False
        try:
            messages, stands = neighbour.link.receive()
        except MalformedError:
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
            assert neighbour.onlooker is not None
            self._unregister(neighbour.onlooker.pidfd)
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
