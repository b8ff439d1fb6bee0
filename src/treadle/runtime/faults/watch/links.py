"""A rank's connections to its neighbours.

All of them belong to the watch's thread and never block it. Of two neighbours the higher rank calls the lower, so that
there is one connection between them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

from treadle.host.sockets import close_in_children
from treadle.host.tcp import connect_to, listen_at, send_at_once
from treadle.runtime.faults.progress.progress_page import OUTSIDE, PageReader, Snapshot
from treadle.runtime.faults.progress.wait_target import NOBODY
from treadle.runtime.faults.watch.contacts import Contact
from treadle.runtime.faults.watch.loss_messages import (
    MOST_MESSAGE_BYTES,
    Condition,
    Greeting,
    Message,
    Observation,
    decode,
    encode,
)
from treadle.wire.frames import FIRST_BYTES, Frames
from treadle.wire.listeners import Listener

MOST_PENDING_BYTES = 4 << 20
"""Bytes kept for a neighbour that does not read; further messages to it are dropped."""

CONNECT_S = 10.0

_CHUNK_BYTES = 1 << 16


class NeighbourLink:
    """The connection to one neighbour; before its greeting, a message may have FIRST_BYTES at most.

    A child that is forked closes its copy: it would keep the connection open beyond this rank's death.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        close_in_children(connection)
        send_at_once(connection)
        self.socket, self._pending, self._frames = connection, bytearray(), Frames(FIRST_BYTES)

    def trust(self) -> None:
        """Allows messages of any kind from now on."""
        self._frames.most_bytes = MOST_MESSAGE_BYTES

    @property
    def pending(self) -> bool:
        """True while bytes wait to be sent."""
        return bool(self._pending)

    def send(self, frame: bytes) -> None:
        """Sends as much as the connection takes now, and keeps the rest for `flush`."""
        if len(self._pending) + len(frame) <= MOST_PENDING_BYTES:
            self._pending += frame
        self.flush()

    def flush(self) -> None:
        """Sends pending bytes. A broken connection is not reported here but by `receive`, behind its last messages."""
        with suppress(BlockingIOError):
            try:
                while self._pending:
                    del self._pending[: self.socket.send(self._pending)]
            except BlockingIOError:
                raise
            except OSError:
                self._pending.clear()

    def read(self) -> bool:
        """Takes the bytes that have come. Returns whether the connection still stands."""
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._frames.feed(data)
        return bool(data)

    def received(self) -> Iterator[Message]:
        """Yields the messages that are whole. Raises WireError."""
        return map(decode, iter(self._frames.next, None))


class Neighbour:
    """A rank next to this one in a ring: how it is reached, and its last known state."""

    def __init__(self, contact: Contact, page_reader: PageReader | None) -> None:
        self.rank, self.contact, self.page_reader = contact.rank, contact, page_reader
        self.link: NeighbourLink | None = None
        self.heard = 0.0
        self.left = False
        self._last = Snapshot(OUTSIDE, NOBODY, -1)

    def hear(self, slots: Snapshot, now: float) -> None:
        """Notes a sign of life, and the slots that came with it."""
        self._last, self.heard = slots, now

    def observe(self, now: float) -> Observation:
        """Returns its last known state. Its page and its goodbye are exact; its last heartbeat is not."""
        slots = self._last if self.left or self.page_reader is None else self.page_reader.look()
        condition = Condition.LEFT if self.left else Condition.SILENT
        exact = self.left or self.page_reader is not None
        still_ms = max(0, int((now - self.heard) * 1000))
        return Observation(self.rank, condition, slots.op, slots.step, still_ms, exact, waits=())


def open_listener(address: str) -> Listener[NeighbourLink]:
    """Returns a non-blocking listener at this address only."""
    try:
        listener = Listener(listen_at(address), NeighbourLink)
    except OSError as error:
        raise ValueError(f"cannot listen at {address} ({error}); give an address of this host with address=") from error
    listener.server.setblocking(False)
    return listener


def call(contact: Contact, rank: int) -> NeighbourLink:
    """Returns a connection to a rank, which has been sent the greeting of `rank`."""
    try:
        connection = connect_to(contact.address, contact.port, CONNECT_S)
        connection.sendall(encode(Greeting(contact.token, rank)))
    except OSError as error:
        where = f"{contact.address}:{contact.port}"
        raise ConnectionError(
            f"rank {rank} cannot reach rank {contact.rank} at {where} ({error}); "
            f"does rank {contact.rank} need address=?"
        ) from error
    return NeighbourLink(connection)
