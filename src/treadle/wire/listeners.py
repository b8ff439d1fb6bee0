"""Listeners and callers for links: a Unix socket on one host, a port with a shared key between hosts."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Protocol

from treadle.host.sockets import close_in_children, close_server, connect, listen
from treadle.host.tcp import connect_to, listen_at, send_at_once
from treadle.wire.errors import WireError
from treadle.wire.link import Link, accept
from treadle.wire.seal import Seal

_ALIVE_S = 1
_PROBES = 3
_BACKLOG = 1024


class Listener(Protocol):
    """Accepts links until it is closed."""

    server: socket.socket

    def accept(self, takes: Any) -> Link[Any] | None:
        """Return the next link, or None for a connection that was refused."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class UnixListener:
    """Listens at `path` for processes of the same user on this host."""

    def __init__(self, path: Path) -> None:
        self.path, self.server = path, listen(path)

    def accept(self, takes: Any) -> Link[Any] | None:
        """Return the next link; the kernel tells the user and the process at its other end."""
        return accept(self.server, takes)

    def close(self) -> None:
        """Stop listening and remove the path."""
        close_server(self.server, self.path)


class KeyedListener:
    """Listens at a free port of `address` for processes that have the key."""

    def __init__(self, address: str, key: bytes) -> None:
        self.server = listen_at(address, _BACKLOG)
        close_in_children(self.server)
        self.address, self.port = address, int(self.server.getsockname()[1])
        self._key = key

    def accept(self, takes: Any) -> Link[Any] | None:
        """Return the next link; its first message will show whether the other end has the key."""
        connection, (host, *_) = self.server.accept()
        try:
            send_at_once(connection)
            return _keyed(connection, takes, Seal(self._key, listens=True), host)
        except OSError:
            connection.close()
            return None

    def close(self) -> None:
        """Stop listening."""
        self.server.close()


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
