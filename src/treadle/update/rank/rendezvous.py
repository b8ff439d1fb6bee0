"""How update ranks find their coordinator: rank 0 writes its contact to the world's store, the others read it.

Without a key the coordinator listens at a Unix socket in the directory of sockets; with one, at a TCP port.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store

from treadle.dist.addresses import own_address
from treadle.dist.clock import host_number
from treadle.dist.rank_world import RankWorld
from treadle.host.pressure import short_of_cores
from treadle.update.protocol.control import FromCoordinator, ToCoordinator
from treadle.update.update_options import UpdateOptions
from treadle.wire.link import Link
from treadle.wire.listeners import Listener, call_path, call_port, listen_at_path, listen_at_port


class CoordinatorContact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the coordinator is, or why there is none (`error`). `number` is its host's; `port` 0: a Unix socket.

    `world` ranks call for updates, which are done by `options`.
    """

    number: int = 0
    host: str = ""
    pid: int = 0
    address: str = ""
    port: int = 0
    error: str = ""
    world: int = 0
    options: UpdateOptions = UpdateOptions()


class StartFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error of a rank that could not start its updater."""

    rank: int
    text: str


_NEWEST = "newest"


def _store_of(store: Store) -> PrefixStore:
    return PrefixStore("treadle/update/coordinator", store)


def newest_contact(store: Store, deadline_s: float) -> CoordinatorContact:
    """Return the contact of the last coordinator in a store. Raises TimeoutError where none comes."""
    kept = _store_of(store)
    try:
        kept.wait([_NEWEST], timedelta(seconds=deadline_s))
    except Exception as error:  # stores raise various types
        raise TimeoutError(f"no updater has been made there within {deadline_s:g} s") from error
    return msgspec.json.decode(kept.get(kept.get(_NEWEST).decode()), type=CoordinatorContact)


class Rendezvous:
    """Connects the updaters of all ranks that were made together; `name` is the same on all of them.

    All calling ranks of a world make their updaters in the same order. The world's store counts them: a process may be
    older than the world, and have made updaters in another. An agent joins the newest.
    """

    def __init__(self, directory: Path, address: str | None, world: RankWorld, options: UpdateOptions) -> None:
        self.path, self.address, self.world, self.options = directory / "coordinator.sock", address, world, options
        self.key: bytes | None = None
        self._store = _store_of(world.store)
        if world.rank < world.size:
            self.name = str(self._store.add(f"made by rank {world.rank}", 1))
        else:
            self.name = self._store.get(_NEWEST).decode()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish what is raised here: a calling rank that cannot start cannot join, and the others wait for it."""
        try:
            yield
        except Exception as error:
            if self.world.rank >= self.world.size:
                raise
            failed = StartFailure(self.world.rank, f"{type(error).__name__}: {error}")
            self._store.set(f"{self.name} failed", msgspec.json.encode(failed).decode())
            if failed.rank == 0:
                self._publish(CoordinatorContact(error=failed.text))
            raise

    def start_failure(self) -> StartFailure | None:
        """Why a rank could not start its updater, if one has published it."""
        key = f"{self.name} failed"
        return msgspec.json.decode(self._store.get(key), type=StartFailure) if self._store.check([key]) else None

    def host(self, make: Callable[[Listener[Link[Any]]], Any]) -> Any:
        """On rank 0: open the listener, make the coordinator, and publish the contact."""
        address, listener = self._listener()
        try:
            made = make(listener)
        except BaseException:
            listener.close()
            raise
        port = listener.server.getsockname()[1] if self.key is not None else 0
        about = host_number(), socket.gethostname(), os.getpid(), address, port
        self._publish(CoordinatorContact(*about, world=self.world.size, options=self.options))
        self._store.set(_NEWEST, self.name)
        return made

    def call(self, deadline_s: float) -> tuple[Link[FromCoordinator], str]:
        """A connection to the coordinator, and its name for error messages."""
        contact = self._contact(deadline_s)
        if contact.error:
            raise RuntimeError(f"update rank 0 could not start its coordinator: {contact.error}")
        if bool(contact.port) != (self.key is not None):
            keyed, bare = ("this rank", "update rank 0") if self.key is not None else ("update rank 0", "this rank")
            raise ValueError(f"{keyed} was given a key and {bare} none; give all ranks the same one, or none any")
        name = f"the coordinator (update rank 0, process {contact.pid}"
        if self.key is not None:
            link = call_port(contact.address, contact.port, self.key, FromCoordinator, deadline_s)
            return link, f"{name} on {contact.host})"
        if contact.number != host_number():
            raise ValueError(
                f"this rank is on {socket.gethostname()} and update rank 0 on {contact.host}: on several hosts all "
                "ranks need the same key, a file that only its owner can read; give it with key= or --key"
            )
        return call_path(self.path, FromCoordinator, deadline_s), f"{name})"

    def _listener(self) -> tuple[str, Listener[Link[Any]]]:
        """Return the listener and its address, empty for a Unix socket. All ranks may call at once."""
        size = self.world.size
        if self.key is None:
            return "", listen_at_path(self.path, ToCoordinator, expected=size)
        address = self.address if self.address is not None else own_address(self.world.store)
        return address, listen_at_port(address, self.key, ToCoordinator, expected=size)

    def _publish(self, contact: CoordinatorContact) -> None:
        self._store.set(self.name, msgspec.json.encode(contact).decode())

    def _contact(self, deadline_s: float) -> CoordinatorContact:
        try:
            self._store.wait([self.name], timedelta(seconds=deadline_s))
        except Exception as error:  # stores raise various types
            raise TimeoutError(
                f"update rank 0 has not published within {deadline_s:g} s where its coordinator is; do all ranks make "
                f"their updaters in the same order?{short_of_cores()}"
            ) from error
        return msgspec.json.decode(self._store.get(self.name), type=CoordinatorContact)
