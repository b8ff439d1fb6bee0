"""How update ranks find their coordinator: rank 0 leaves word in torch's store, the others read it.

On one host it is a Unix socket in the directory of sockets; with a key, a port that other hosts reach.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.addresses import own_address
from treadle.dist.clock import host_number
from treadle.host.pressure import short_of_cores
from treadle.update.protocol.control import FromCoordinator
from treadle.wire.link import Link
from treadle.wire.listeners import KeyedListener, Listener, UnixListener, call_path, call_port

_NUMBERS = itertools.count()
"""All ranks make updaters in the same order, so they count alike."""


class CoordinatorContact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the coordinator is: `number` is its host's, `port` 0 for a Unix socket. Or why there is none."""

    number: int = 0
    host: str = ""
    pid: int = 0
    address: str = ""
    port: int = 0
    error: str = ""


class Rendezvous:
    """One meeting of the update ranks, for one updater of each; `name` is the same on all of them."""

    def __init__(self, directory: Path, key: bytes | None, address: str | None) -> None:
        self.path, self.key, self.address = directory / "coordinator.sock", key, address
        self._store = PrefixStore("treadle/update/coordinator", _get_default_store())
        self.name = str(next(_NUMBERS))

    def host(self, make: Callable[[Listener], Any]) -> Any:
        """On rank 0: opens the door, has the coordinator made, and leaves word, of a failure too."""
        try:
            door: Listener = self._door()
            try:
                made = make(door)
            except BaseException:
                door.close()
                raise
        except Exception as error:
            self._leave(CoordinatorContact(error=f"{type(error).__name__}: {error}"))
            raise
        where = (door.address, door.port) if isinstance(door, KeyedListener) else ("", 0)
        self._leave(CoordinatorContact(host_number(), socket.gethostname(), os.getpid(), *where))
        return made

    def call(self, deadline_s: float) -> tuple[Link[FromCoordinator], str]:
        """A connection to the coordinator, and what to call it."""
        word = self._word(deadline_s)
        if word.error:
            raise RuntimeError(f"update rank 0 could not start its coordinator: {word.error}")
        if bool(word.port) != (self.key is not None):
            keyed, bare = ("this rank", "update rank 0") if self.key is not None else ("update rank 0", "this rank")
            raise ValueError(f"{keyed} was given a key and {bare} none; give all ranks the same one, or none any")
        name = f"the coordinator (update rank 0, process {word.pid}"
        if self.key is not None:
            link = call_port(word.address, word.port, self.key, FromCoordinator, deadline_s)
            return link, f"{name} on {word.host})"
        if word.number != host_number():
            raise ValueError(
                f"this rank is on {socket.gethostname()} and update rank 0 on {word.host}: on several hosts all ranks "
                "need the same key, a file that only its owner can read; give it with key= or --key"
            )
        return call_path(self.path, FromCoordinator, deadline_s), f"{name})"

    def _door(self) -> Listener:
        if self.key is None:
            return UnixListener(self.path)
        return KeyedListener(self.address if self.address is not None else own_address(), self.key)

    def _leave(self, word: CoordinatorContact) -> None:
        self._store.set(self.name, msgspec.json.encode(word).decode())

    def _word(self, deadline_s: float) -> CoordinatorContact:
        try:
            self._store.wait([self.name], timedelta(seconds=deadline_s))
        except Exception as error:  # a store raises what it likes
            raise TimeoutError(
                f"update rank 0 has not said within {deadline_s:g} s where its coordinator is; do all ranks make "
                f"their updaters in the same order?{short_of_cores()}"
            ) from error
        return msgspec.json.decode(self._store.get(self.name), type=CoordinatorContact)
