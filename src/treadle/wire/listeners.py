"""Listeners and callers: a Unix socket on one host, a port between hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from treadle.host.sockets import close_in_children, close_server, connect, listen, place_of, refuse_strangers
from treadle.host.tcp import connect_to, listen_at, send_at_once
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.link import Link
from treadle.wire.seal import Seal

C = TypeVar("C")

MOST_STRANGERS = 64
"""Strangers that a listener holds at once, beside those that it expects; one more closes the oldest."""

HELLO_S = 20.0
"""How long a connection may take to identify itself. On a host that is short of cores this takes seconds."""

PAUSE_S = 0.05
"""The pause before a retry where a shortage passes by itself: of descriptors, of places."""

_ALIVE_S = 1
_PROBES = 3


class Listener(Generic[C]):
    """Accepts connections, and counts strangers: those that have not identified themselves. Thread-safe.

    `greet` makes the link of a connection, or raises OSError where the peer is refused or gone. `expected` strangers
    have room beside MOST_STRANGERS. `path` is a Unix server's, and goes when it is closed.
    """

    def __init__(
        self, server: socket.socket, greet: Callable[[socket.socket], C], *, expected: int = 0, path: Path | None = None
    ) -> None:
        close_in_children(server)
        self.server, self._path, self.closed = server, path, False
        self.place = place_of(path) if path is not None else None
        self.strangers: dict[C, float] = {}
        """In the order in which they came, with the time by which each must identify itself (monotonic)."""
        self._greet, self._most = greet, MOST_STRANGERS + expected
        self._lock = threading.Lock()

    def accept(self) -> C | None:
        """Return the next connection, a stranger; then drop those that are `overdue`.

        None after a connection that was refused or is gone, after PAUSE_S without descriptors, and once closed.
        """
        try:
            connection, _ = self.server.accept()
        except OSError as error:
            if not self.closed and not isinstance(error, BlockingIOError):
                time.sleep(PAUSE_S)
            return None
        try:
            link = self._greet(connection)
        except OSError:
            connection.close()
            return None
        with self._lock:
            self.strangers[link] = time.monotonic() + HELLO_S
        return link

    def overdue(self) -> Iterator[tuple[C, OSError]]:
        """Discard strangers whose time is over, and the oldest where there are too many; yield each with the reason."""
        crowd = f"{self._most} others came that have not said yet who they are; try again"
        while True:
            with self._lock:
                link, until = next(iter(self.strangers.items()), (None, 0.0))
                is_late = time.monotonic() > until
                if link is None or not (is_late or len(self.strangers) > self._most):
                    return
                del self.strangers[link]
            yield link, TimeoutError(f"nothing came for {HELLO_S:g} s") if is_late else PeerGoneError(crowd)

    def discard(self, link: C) -> bool:
        """Drop a connection from the strangers: it has identified itself, or ended. False if it was none any more."""
        with self._lock:
            return self.strangers.pop(link, None) is not None

    def close(self) -> None:
        """Stop listening; a thread in `accept` returns. Connections stay."""
        self.closed = True
        close_server(self.server, self._path, self.place)


def listen_at_path(path: Path, takes: Any, *, expected: int = 0) -> Listener[Link[Any]]:
    """Return a listener at `path` for processes of the same user on this host, as the kernel knows them."""

    def greet(connection: socket.socket) -> Link[Any]:
        refuse_strangers(connection)
        return Link(connection, takes)

    return Listener(listen(path), greet, expected=expected, path=path)


def listen_at_port(address: str, key: bytes, takes: Any, *, expected: int = 0) -> Listener[Link[Any]]:
    """Return a listener at a free port of `address`; a link's first message shows whether its peer has the key."""

    def greet(connection: socket.socket) -> Link[Any]:
        send_at_once(connection)
        return _keyed(connection, takes, Seal(key, listens=True), connection.getpeername()[0])

    return Listener(listen_at(address), greet, expected=expected)


class LinkThreads:
    """Serves each link of a listener in a thread of its own. What `serve(link)` raises is the reason of its end."""

    def __init__(self, listener: Listener[Link[Any]], serve: Callable[[Link[Any]], None], name: str) -> None:
        self.listener, self._serve = listener, serve
        self.links: set[Link[Any]] = set()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections; their threads may go on for a while."""
        self.listener.close()
        self._thread.join()  # the last link that it accepted is among them
        for link in self.links.copy():
            link.shut()

    def _accept(self) -> None:
        while not self.listener.closed:
            link = self.listener.accept()
            if link is not None:
                self.links.add(link)
                threading.Thread(target=self._run, args=(link,), name="treadle link", daemon=True).start()
            for stranger, why in self.listener.overdue():
                stranger.refuse(why)

    def _run(self, link: Link[Any]) -> None:
        try:
            self._serve(link)
        except (WireError, OSError) as error:
            link.refuse(error)
        finally:
            self.listener.discard(link)
            self.links.discard(link)
            link.close()


def call_path(path: Path, takes: Any, deadline_s: float) -> Link[Any]:
    """Return a link to the listener at `path`, which may open within `deadline_s`."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            return Link(connect(path), takes)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody answers at {path} within {deadline_s:g} s: {error.strerror}") from None
            time.sleep(0.01)


def call_port(address: str, port: int, key: bytes, takes: Any, deadline_s: float) -> Link[Any]:
    """Return a link to the listener at a port, with nonces exchanged."""
    connection = connect_to(address, port, deadline_s)
    try:
        link: Link[Any] = _keyed(connection, takes, Seal(key, listens=False), address)
        link.meet(deadline_s)
    except (OSError, WireError):
        connection.close()
        raise
    return link


def _keyed(connection: socket.socket, takes: Any, seal: Seal, host: str) -> Link[Any]:
    """Return a sealed link. Keepalive has a dead host or cable noticed within a few seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_PROBES + 1) * _ALIVE_S * 1000)
    return Link(connection, takes, seal=seal, peer=f"a process on {host}")
