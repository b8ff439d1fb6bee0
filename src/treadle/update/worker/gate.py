"""The gate in front of an engine: requests pass while it is open; an update closes it and waits for them.

A lease bounds the time in which it is open. It is looked at when a request enters and before its answer leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.host.boot_clock import boot_ns
from treadle.host.errors import TreadleError


class ClosedError(TreadleError, RuntimeError):
    """The gate is closed: no version is served now."""


class Gate:
    """A gate that is open on one version, or closed. It starts closed: an engine's first weights have no version."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: int | None = None
        self._until_ns: int | None = None
        self._inside = 0
        self._hurry = False

    @property
    def version(self) -> int | None:
        """The version served; None while closed, or once the lease is over."""
        return self._version if not self._is_over() else None

    @property
    def inside(self) -> int:
        """How many requests are inside."""
        return self._inside

    @property
    def hurry(self) -> bool:
        """True while requests are asked to break off. A request that can then ends early."""
        return self._hurry

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Pass the gate with a request; yields the version that answers it.

        Raises ClosedError where it is closed, and at the end where its lease is over: the answer must not leave.
        """
        with self._changed:
            if self._version is None:
                raise ClosedError("closed for an update, or waiting for its first; try again")
            self._refuse_late()
            version = self._version
            self._inside += 1
        try:
            yield version
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()
        self._refuse_late()

    def _is_over(self) -> bool:
        return self._until_ns is not None and boot_ns() >= self._until_ns

    def _refuse_late(self) -> None:
        if self._is_over():
            raise ClosedError("its lease is over: the update ranks have not been heard; try again, or ask another one")

    def lease(self, until_ns: int | None) -> None:
        """Set until when a version may be served (`boot_ns`); None for without end."""
        with self._changed:
            self._until_ns = until_ns
            self._changed.notify_all()

    def close(self, how: str, deadline_s: float) -> str | None:
        """Let nobody in and wait for the requests inside; `how="abort"` asks them to end early.

        Where they do not end within `deadline_s`, opens the gate again and returns what is wrong.
        """
        with self._changed:
            was = self._version
            self._version = None
            self._hurry = how == "abort"
            empty = self._changed.wait_for(lambda: not self._inside, deadline_s)
            self._hurry = False
            if not empty:
                self._version = was
                return f"{self._inside} requests still run after {deadline_s:g} s; allow more, or close='abort'"
        return None

    def open(self, version: int) -> None:
        """Serve this version."""
        with self._changed:
            self._version = version
