"""The address at which other ranks reach this host."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def own_address(store: Any = None) -> str:
    """Return the address at which other ranks reach this process.

    It is the address from which this process reaches the store, torch's if not given, as the others do. Without a
    TCP store it is the address of the host's name, or that of the default route if the name stands for a loopback.
    """
    with suppress(Exception):  # private names of torch: after any failure the ways below are tried
        store = store if store is not None else dist.distributed_c10d._get_default_store()
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
    """Return this process's address towards `host`. A datagram socket has one without sending anything."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
