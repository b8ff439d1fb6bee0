"""The gate of a worker: requests pass while it is open, an update waits until they are through."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.host.errors import TreadleError


class ClosedError(TreadleError, RuntimeError):
    """Nothing is served now."""


class Gate:
    """Open on one version, or closed. It starts closed: what an engine holds when it starts may be of any age."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: int | None = None
        self._inside = 0
        self._hurry = False

    @property
    def version(self) -> int | None:
        """What is served; None while closed."""
        return self._version

    @property
    def inside(self) -> int:
        """How many requests are inside."""
        return self._inside

    @property
    def hurry(self) -> bool:
        """Are requests asked to break off: those that can look at this, do."""
        return self._hurry

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Around a request; gives the version that answers it. Raises Closed."""
        with self._changed:
            if self._version is None:
                raise ClosedError("closed for an update, or waiting for its first; try again")
            version = self._version
            self._inside += 1
        try:
            yield version
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, how: str, deadline_s: float) -> str | None:
        """Lets nobody in and waits until all are out; `how="abort"` asks them to hurry. Says what keeps it, if so."""
        with self._changed:
            was = self._version
            self._version = None
            self._hurry = how == "abort"
            until = time.monotonic() + deadline_s
            while self._inside:
                if not self._changed.wait(until - time.monotonic()):
                    self._version, self._hurry = was, False
                    return f"{self._inside} requests still run after {deadline_s:g} s; allow more, or close='abort'"
            self._hurry = False
        return None

    def open(self, version: int) -> None:
        """Serves this version from here on."""
        with self._changed:
            self._version = version
