"""Where the coordinator is called: a Unix socket on one host, a keyed port where update ranks are on several."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Protocol

from treadle.host.sockets import close_server, connect, listen
from treadle.wire.link import Link, accept
from treadle.wire.seal import Seal

_ALIVE_S = 1
_PROBES = 3


class Listener(Protocol):
    """Listens until it is closed."""

    server: socket.socket

    def accept(self, takes: Any) -> Link[Any] | None:
        """Who has come; None for one that is refused."""
        ...

    def close(self) -> None:
        """Takes no more."""
        ...


class UnixListener:
    """For processes of the same user on this host."""

    def __init__(self, path: Path) -> None:
        self.path, self.server = path, listen(path)

    def accept(self, takes: Any) -> Link[Any] | None:
        """The kernel says who it is."""
        return accept(self.server, takes)

    def close(self) -> None:
        """The path is gone then."""
        close_server(self.server, self.path)


class KeyedListener:
    """For whoever has the key, at a port of `address`."""

    def __init__(self, address: str, key: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.server = socket.create_server((address, 0), family=family, backlog=1024)
        self.address, self.port = address, int(self.server.getsockname()[1])
        self._key = key

    def accept(self, takes: Any) -> Link[Any] | None:
        """Its first message will show whether it has the key."""
        connection, (host, *_) = self.server.accept()
        try:
            return _keyed(connection, takes, Seal(self._key, listens=True), host)
        except OSError:
            connection.close()
            return None

    def close(self) -> None:
        """Takes no more."""
        self.server.close()


def call_path(path: Path, takes: Any, deadline_s: float) -> Link[Any]:
    """A connection to who listens on this host, or is about to."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            return Link(connect(path), takes)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody answers at {path} within {deadline_s:g} s: {error.strerror}") from None
            time.sleep(0.01)


def call_port(address: str, port: int, key: bytes, takes: Any, deadline_s: float) -> Link[Any]:
    """A connection to who listens at a port, with random numbers exchanged."""
    connection = socket.create_connection((address, port), timeout=deadline_s)
    try:
        link: Link[Any] = _keyed(connection, takes, Seal(key, listens=False), address)
    except OSError:
        connection.close()
        raise
    link.meet(deadline_s)
    return link


def _keyed(connection: socket.socket, takes: Any, seal: Seal, host: str) -> Link[Any]:
    """A host that is gone, or a cable, is noticed within a few seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_PROBES + 1) * _ALIVE_S * 1000)
    return Link(connection, takes, seal=seal, peer=f"a process on {host}")
