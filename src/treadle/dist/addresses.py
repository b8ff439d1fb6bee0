"""The address of this host at which other ranks can call."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import torch.distributed as dist


def own_address() -> str:
    """The address at which neighbours can call this process.

    It is the one from which the store is reached, as the other ranks reach the store too; where there is no such
    store, what the host's name stands for, or the address of the default route if that is a loopback.
    """
    with suppress(Exception):  # a private way to the store: any failure leaves the ways below
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return _address_towards(str(getattr(store, "host")))  # noqa: B009
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not ipaddress.ip_address(address).is_loopback:
            return address
    with suppress(OSError):
        return _address_towards("192.0.2.1")  # reserved for documentation; nothing is sent
    return "127.0.0.1"


def _address_towards(host: str) -> str:
    """The address this process has towards `host`: a datagram socket is given one without sending anything."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
