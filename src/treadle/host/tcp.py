"""TCP sockets between hosts: listeners at one address, and connections that send small messages at once."""

from __future__ import annotations

import socket

_BACKLOG = 1024


def listen_at(address: str) -> socket.socket:
    """Return a server at a free port of `address`, IPv4 or IPv6, and of no other address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def connect_to(address: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to the server at `port` of `address`."""
    connection = socket.create_connection((address, port), timeout=timeout_s)
    send_at_once(connection)
    return connection


def send_at_once(connection: socket.socket) -> None:
    """Has small messages sent when they are written, not when a packet is full or an acknowledgement has come."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
