"""Keeps the lease of a rank's worker: a thread that reports how the worker stands, and hands it what is granted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from treadle.host.sockets import connect, place_of
from treadle.update.protocol.update_messages import PROTOCOL, Describe, FromWorker, Grant, Hello, Status
from treadle.update.worker.endpoint import worker_path
from treadle.wire.errors import WireError
from treadle.wire.link import Link

ROUNDS = 3
"""Rounds in a lease."""


class LeaseKeeper:
    """Asks the worker, reports, and passes on the grant, some times in each lease, until it is closed.

    It has a connection of its own, so that a worker that drains or loads is heard. `tell` sends to the coordinator.
    """

    def __init__(self, directory: Path, worker: int, rank: int, lease_s: float, tell: Callable[[Status], None]) -> None:
        self.path, self.rank, self.lease_s, self._tell = worker_path(directory, worker), rank, lease_s, tell
        self._changed = threading.Condition()
        self._grant: Grant | None = None
        self._wanted = self._done = self._rounds = 0
        self._closed = False
        self._link: Link[FromWorker] | None = None
        self._place: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name=f"treadle lease {worker}", daemon=True)
        self._thread.start()

    def take(self, grant: Grant) -> None:
        """Take a grant of the coordinator, from any thread."""
        with self._changed:
            self._grant = grant
            self._changed.notify_all()

    def renew(self, deadline_s: float) -> bool:
        """Begin a round now, and wait for one that renews the lease; whether one did in time."""
        with self._changed:
            self._wanted = mine = self._rounds + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= mine, deadline_s)

    @property
    def hears(self) -> bool:
        """Whether the worker answered in the last round."""
        return self._link is not None

    def close(self) -> None:
        """End the thread. The worker serves until its lease is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        link = self._link
        if link is not None:
            link.shut()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            began = time.monotonic()
            with self._changed:
                self._rounds += 1
                number = self._rounds
            try:
                renewed = self._round(number)
            except (WireError, OSError):  # it is gone, or the coordinator is; another round comes
                renewed = False
                self._drop()
            with self._changed:
                if renewed:
                    self._done = number
                    self._changed.notify_all()
                left_s = began + self.lease_s / ROUNDS - time.monotonic()
                self._changed.wait_for(lambda: self._closed or self._wanted > self._rounds, left_s)
        self._drop()

    def _round(self, number: int) -> bool:
        """Report once; whether the worker's lease was renewed."""
        status = self._ask(Describe())
        if not isinstance(status, Status):
            return False
        self._tell(status)
        with self._changed:
            until_s = self.lease_s / ROUNDS
            self._changed.wait_for(lambda: self._closed or self._wanted > number or self._is_for(status), until_s)
            grant = self._grant if self._is_for(status) else None
        return grant is not None and isinstance(self._ask(grant), Status)

    def _is_for(self, status: Status) -> bool:
        return self._grant is not None and self._grant.stamp_ns == status.stamp_ns

    def _ask(self, message: Any) -> FromWorker:
        link = self._connected()
        link.send(message, timeout_s=self.lease_s / ROUNDS)
        return link.receive(self.lease_s)

    def _connected(self) -> Link[FromWorker]:
        """The connection, unless another process is at the worker's path by now."""
        there = place_of(self.path)
        if self._link is not None and there in (None, self._place):
            return self._link
        self._drop()
        if self._closed:
            raise WireError("the keeper is closed")
        link: Link[FromWorker] = Link(connect(self.path), FromWorker)
        self._link, self._place = link, there
        link.trust()
        link.send(Hello(PROTOCOL, "lease", self.rank), timeout_s=self.lease_s / ROUNDS)
        if not isinstance(link.receive(self.lease_s), Status):
            raise WireError("no welcome came")
        return link

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with suppress(OSError):
                link.close()
