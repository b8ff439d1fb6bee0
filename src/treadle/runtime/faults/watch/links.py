"""The few connections of a rank, and the door through which they come.

All of them belong to the watch's thread and never block it. Of two neighbours the higher rank calls the lower, so that
there is one connection between them. The door is shut once everyone expected has come.
"""

from __future__ import annotations

import hmac
import socket
from contextlib import suppress

from treadle.runtime.faults.progress.page import COMPUTING, OUTSIDE, PageReader, Snapshot
from treadle.runtime.faults.watch.contacts import Contact
from treadle.runtime.faults.watch.messages import (
    Condition,
    Frames,
    Greeting,
    MalformedError,
    Message,
    Observation,
    encode,
)

MOST_PENDING_BYTES = 4 << 20
"""What is kept for a neighbour that does not read; what comes on top is dropped."""

MOST_STRANGERS = 64
"""Callers that have not said who they are; the oldest goes when there are more."""

CONNECT_S = 10.0


class NeighbourLink:
    """The connection to one neighbour."""

    def __init__(self, connection: socket.socket, frames: Frames) -> None:
        self.socket, self._frames, self._pending = connection, frames, bytearray()

    @property
    def pending(self) -> bool:
        """Is there something that could not be sent yet."""
        return bool(self._pending)

    def send(self, frame: bytes) -> None:
        """Sends now what the connection takes, and keeps the rest for `flush`."""
        if len(self._pending) + len(frame) <= MOST_PENDING_BYTES:
            self._pending += frame
        self.flush()

    def flush(self) -> None:
        """Sends what is pending. A connection that broke says so when it is read, after all that came before."""
        with suppress(BlockingIOError):
            try:
                while self._pending:
                    del self._pending[: self.socket.send(self._pending)]
            except BlockingIOError:
                raise
            except OSError:
                self._pending.clear()

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection still stands."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        return self._frames.feed(data), bool(data)


class Neighbour:
    """A rank next to this one in a ring: how it is reached, and what was last seen of it."""

    def __init__(self, card: Contact, onlooker: PageReader | None) -> None:
        self.rank, self.card, self.onlooker = card.rank, card, onlooker
        self.link: NeighbourLink | None = None
        self.heard = 0.0
        self.left = False
        self._last = Snapshot(OUTSIDE, COMPUTING, -1)

    def hear(self, slots: Snapshot, now: float) -> None:
        """Takes note of a sign of life."""
        self._last, self.heard = slots, now

    def sight(self, now: float) -> Observation:
        """What it was last seen doing. Its page is exact; its last heartbeat is not, unless that was its goodbye."""
        slots = self._last if self.left or self.onlooker is None else self.onlooker.look()
        condition = Condition.LEFT if self.left else Condition.SILENT
        exact = self.left or self.onlooker is not None
        still_ms = max(0, int((now - self.heard) * 1000))
        return Observation(self.rank, condition, slots.op, slots.step, still_ms, exact, waits=())


class PendingConnection:
    """A connection whose caller has not said who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.frames = connection, Frames()

    def identify(self, token: bytes) -> tuple[Greeting | None, list[Message], bool]:
        """The caller's hello once it is there, what it said after it, and whether the connection may stay."""
        try:
            data = self.socket.recv(1 << 12)
            messages = self.frames.feed(data)
        except BlockingIOError:
            return None, [], True
        except (OSError, MalformedError):
            return None, [], False
        if not messages:
            return None, [], bool(data)
        hello, *rest = messages
        if isinstance(hello, Greeting) and hmac.compare_digest(hello.token, token):
            return hello, rest, True
        return None, [], False


def open_door(address: str) -> socket.socket:
    """A listening socket at this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        door = socket.create_server((address, 0), family=family, backlog=MOST_STRANGERS)
    except OSError as error:
        raise ValueError(f"cannot listen at {address} ({error}); give an address of this host with address=") from error
    door.setblocking(False)
    return door


def call(card: Contact, rank: int) -> socket.socket:
    """A connection to the rank with this card, which has been told who calls."""
    try:
        connection = socket.create_connection((card.address, card.port), timeout=CONNECT_S)
        connection.sendall(encode(Greeting(card.token, rank)))
    except OSError as error:
        where = f"{card.address}:{card.port}"
        raise ConnectionError(
            f"rank {rank} cannot reach rank {card.rank} at {where} ({error}); does rank {card.rank} need address=?"
        ) from error
    make_ready(connection)
    return connection


def make_ready(connection: socket.socket) -> None:
    """Never blocks, and sends small messages at once."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
