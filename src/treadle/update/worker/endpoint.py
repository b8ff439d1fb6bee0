"""The endpoint of a worker: a socket for updates and questions, served by threads beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.host.sockets import place_of
from treadle.update.protocol.update_messages import (
    PROTOCOL,
    Answer,
    Ask,
    Describe,
    FromWorker,
    Grant,
    Hello,
    Map,
    Refused,
    ToWorker,
)
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.gate import ClosedError
from treadle.update.worker.slot import Slot
from treadle.update.worker.worker import Worker
from treadle.wire.codec import sendable
from treadle.wire.errors import PeerGoneError, RefusedError, WireError
from treadle.wire.frames import FIRST_BYTES, MOST_BYTES
from treadle.wire.link import Link
from treadle.wire.listeners import HELLO_S, LinkThreads, listen_at_path

MOST_ASKERS = 32
MOST_ASK_BYTES = 4 << 20
"""The largest question of an asker: a million tokens of four bytes. All askers together hold 128 MiB at most."""

WATCH_S = 0.1
"""Seconds between two looks at whether another process has taken the worker's place, or left it."""

RETIRE_S = 2.0
"""Seconds that requests get to break off in an engine whose place another process has taken."""

Answering = Callable[[bytes], tuple[int, bytes]]


def worker_path(directory: Path, worker: int) -> Path:
    """Return the path of a worker's socket."""
    return directory / f"worker-{worker}.sock"


class Endpoint:
    """Listens for one worker until it is closed.

    `answer(body)` serves Ask: it returns the version that answered, and the answer. `spill` is a directory for
    `rollback="disk"`. `replica` is the number of the first worker of its engine, where that has several. One process at
    a time holds the worker's slot, and only it serves: where another process has put its socket at this path, this
    endpoint closes the engine and releases the slot, which the other then takes; so does an earlier endpoint
    of this process.
    """

    def __init__(
        self,
        adapter: Adapter,
        directory: Path,
        worker: int,
        *,
        answer: Answering | None = None,
        spill: Path | None = None,
        replica: int | None = None,
    ) -> None:
        self.worker = Worker(adapter, worker, spill, replica)
        self.answer = answer
        self.path = worker_path(directory, worker)
        self._listener = listen_at_path(self.path, ToWorker)
        self._slot = Slot(self.path.with_suffix(".slot"), lambda: self.worker.retire(RETIRE_S))
        self.worker.before, self.worker.slot = self._slot.holder, self._slot.id
        self.worker.place(holds_slot=self._slot.held)
        self._askers: set[Link[ToWorker]] = set()
        self._master: Link[ToWorker] | None = None
        self._guard = threading.Lock()
        self._links = LinkThreads(self._listener, self._serve, f"treadle worker {worker}")
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watch_place, name=f"treadle slot {worker}", daemon=True)
        self._watch.start()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def num_askers(self) -> int:
        """How many connections there are that ask, not counting update ranks and strangers."""
        return len(self._askers)

    def close(self) -> None:
        """Stop listening, and take a load back. A worker that serves keeps its slot until its process ends."""
        self._over.set()
        self._watch.join(2 * RETIRE_S)  # an engine that hangs keeps the thread
        self._links.close()
        if self.worker.depart(2 * RETIRE_S):
            self._slot.give_back()

    def _watch_place(self) -> None:
        while not self._over.wait(WATCH_S):
            if place_of(self.path) not in (None, self._listener.place):  # a path that is gone is not taken
                if self.worker.retire(RETIRE_S):
                    self._slot.give_back()
                    self._stop_updates()
                    return
            elif not self._slot.held and self._slot.take():
                self.worker.slot = self._slot.id
                self.worker.place(holds_slot=True)

    def _stop_updates(self) -> None:
        """Disconnect the update rank, which then finds the other process. Askers stay, and are told it is closed."""
        with self._guard:
            master, self._master = self._master, None
        if master is not None:
            master.refuse(RefusedError(f"another process has taken the place of worker {self.worker.worker}"))

    def _serve(self, link: Link[ToWorker]) -> None:
        try:
            self._converse(link)
        except (WireError, OSError) as error:
            link.refuse(error)  # first: to go back may take a while
        finally:
            with self._guard:
                self._askers.discard(link)
                was_master, self._master = self._master is link, None if self._master is link else self._master
            if was_master:
                self.worker.release(lambda: self._master is not None)

    def _converse(self, link: Link[ToWorker]) -> None:
        hello = link.receive(HELLO_S)
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL or hello.role == "join":
            raise WireError(f"a connection begins with Hello of protocol {PROTOCOL}, got {hello}")
        self._admit(link, hello)
        link.trust(MOST_BYTES if hello.role == "update" else MOST_ASK_BYTES + FIRST_BYTES)
        link.send(self.worker.status)
        while True:
            message = link.receive(None)
            answer = self._answer(link, hello, message)
            link.drop_fds()
            link.send(answer)

    def _admit(self, link: Link[ToWorker], hello: Hello) -> None:
        """Give a connection its place, now that it has said who it is. Raises PeerGoneError where there is none."""
        with self._guard:
            if not self._listener.discard(link):
                raise PeerGoneError("closed as the oldest of too many that had not said who they are")
            if hello.role == "lease":  # one for each update rank
                return
            if hello.role != "update":
                if len(self._askers) >= MOST_ASKERS:
                    raise PeerGoneError(f"{MOST_ASKERS} others ask this worker; close connections, or share one")
                self._askers.add(link)
                return
            before, self._master = self._master, link  # the end of an older connection means nothing any more
        if before is not None:
            who = f"update rank {hello.rank} of process {link.pid}"
            before.refuse(RefusedError(f"{who} has taken worker {self.worker.worker} over"))

    def _answer(self, link: Link[ToWorker], hello: Hello, message: Any) -> FromWorker:
        if isinstance(message, Describe) and not message.wants:
            return self.worker.status
        if isinstance(message, Ask):
            return self._ask(message)
        if hello.role == "lease" and isinstance(message, Grant):
            return self.worker.renew(message)
        if hello.role != "update":
            raise WireError(f"{type(message).__name__} comes from update ranks only")
        if self._master is not link:
            raise PeerGoneError("another update rank has taken over")
        if isinstance(message, Map):
            return self.worker.map(message, link.fds)
        return self.worker.handle(message)

    def _ask(self, message: Ask) -> FromWorker:
        if self.answer is None:
            return Refused("order", "this worker answers no questions here")
        try:
            version, body = self.answer(message.body)
        except ClosedError as closed:
            return Refused("closed", str(closed))
        except Exception as error:  # the engine's code may raise anything
            return Refused("failed", sendable(f"{type(error).__name__}: {error}"))
        return Answer(version, body)
