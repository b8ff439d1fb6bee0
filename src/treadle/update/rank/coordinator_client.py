"""An update rank's connection to the coordinator."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from treadle.update.errors import UpdateError, failure
from treadle.update.protocol.control import Asked, Call, Enter, Fault, FromCoordinator, Go, Phase, Proceed
from treadle.update.protocol.update_messages import PROTOCOL, Grant, Hello, Status
from treadle.update.rank.inbox import Inbox, read_into
from treadle.update.rank.rendezvous import Rendezvous
from treadle.update.update_options import UpdateOptions
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.link import Link
from treadle.wire.listeners import PAUSE_S

WHY_S = 1.0

LOOK_S = 1.0
"""Seconds between two looks at whether a rank could not start, while the first attempt waits for all ranks."""


class CoordinatorClient:
    """Sends messages to the coordinator. A lost connection is final: calling ranks must be started again."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world: int, inbox: Inbox, options: UpdateOptions) -> None:
        self.inbox, self.options, self._rendezvous = inbox, options, rendezvous
        self.epoch = self.call = 0
        self.told: Fault | None = None
        """The coordinator's word that this attempt failed, if it has sent one."""
        self._stopping = threading.Lock()
        self.lost = self._met = False
        self.why_lost = ""
        self.granted: Callable[[Grant], None] = lambda grant: None
        """Hears the leases that are granted, in the thread that reads."""
        hello = Hello(PROTOCOL, "join", rank, world, os.getpid(), socket.gethostname())
        self._called = threading.Condition()
        self._call = Call(0, Asked("recover", 0))
        self._link, self.name = _join(rendezvous, hello, options.deadline_s)
        read_into(inbox, "coordinator", self._link, self._take, self._gone)

    def _take(self, message: Any) -> bool:
        if isinstance(message, Fault):
            with self._stopping:
                if message.epoch in (0, self.epoch) and message.call in (0, self.call):
                    self.told = message
                    self.inbox.fail(UpdateError(message))
            return True
        if isinstance(message, Grant):
            self.granted(message)
            return True
        if isinstance(message, Call):
            with self._called:
                self._call = message
                self._called.notify_all()
            return True
        if isinstance(message, Go) and not self.epoch:
            self.epoch, self._met = message.epoch, True  # at once: the next message may belong to this attempt
        return bool(message.epoch != self.epoch)

    def begin(self, call: int = 0) -> None:
        """Begin an attempt, that of a call to an agent; late messages of earlier ones are dropped."""
        with self._stopping:  # a Fault that is being taken ends the attempt before, not this one
            self.epoch, self.call, self.told = 0, call, None
            self.inbox.start()

    def next_call(self, after: int, timeout_s: float) -> Call | None:
        """Wait for a call to an attempt above that number; the last one, or None where none comes or can come."""
        with self._called:
            self._called.wait_for(lambda: self._call.number > after or self.lost, timeout_s)
            return self._call if self._call.number > after and not self.lost else None

    def _gone(self, text: str) -> None:
        self.why_lost = text
        with self._called:
            self.lost = True
            self._called.notify_all()
        self.inbox.fail(failure(self.epoch, self.name, "enter", f"lost: {text}"))

    def send(self, message: Any, phase: Phase) -> None:
        """Send a message. Raises UpdateError where the coordinator is gone."""
        try:
            self._link.send(message)
        except OSError as error:
            self.inbox.wait_bad(WHY_S)  # the reading thread may be about to learn why
            raise self.inbox.bad or failure(self.epoch, self.name, phase, f"lost: {error}") from error

    def report_status(self, status: Status) -> None:
        """Report how the worker stands. Raises OSError where the coordinator is gone."""
        self._link.send(status)

    def report(self, message: Fault | Enter) -> None:
        """Report a fault, or an entry with one, if the coordinator is still there."""
        with suppress(OSError):
            self._link.send(message, timeout_s=2.0)

    def hear(self, kinds: tuple[type[Any], ...], phase: Phase) -> FromCoordinator:
        """Return the next message. Raises UpdateError where it is late, or of another kind."""
        try:
            message = self._next(self.options.phase_s + 2 * (self.options.lease_s or 0.0) + 3)
        except (TimeoutError, PeerGoneError) as error:
            raise failure(self.epoch, self.name, phase, str(error)) from error
        if not isinstance(message, kinds):
            named = " or ".join(kind.__name__ for kind in kinds)
            text = f"{type(message).__name__} came where {named} was expected"
            raise failure(self.epoch, self.name, phase, text)
        return message  # type: ignore[no-any-return]

    def _next(self, deadline_s: float) -> Any:
        """Return the next message. Until the first Go, some ranks may not have joined, and may never do so."""
        until = time.monotonic() + deadline_s
        while not self._met and time.monotonic() + LOOK_S < until:
            failed = self._rendezvous.start_failure()
            if failed is not None:
                raise failure(0, f"update rank {failed.rank}", "enter", f"it could not start: {failed.text}")
            with suppress(TimeoutError):
                return self.inbox.wait("coordinator", LOOK_S)
        return self.inbox.wait("coordinator", max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the connection; a coordinator that goes on takes this rank for lost."""
        self._link.shut()


def _join(rendezvous: Rendezvous, hello: Hello, deadline_s: float) -> tuple[Link[FromCoordinator], str]:
    """A connection that the coordinator has accepted, and the coordinator's name. Raises UpdateError if it refuses.

    A coordinator that has too many strangers closes connections that have not joined yet, so this calls again.
    """
    until = time.monotonic() + deadline_s
    while True:
        try:
            return _try_to_join(rendezvous, hello, until)
        except PeerGoneError as error:
            if time.monotonic() + PAUSE_S > until:
                text = f"closed every connection of update rank {hello.rank} for {deadline_s:g} s: {error}"
                raise failure(0, "the coordinator", "enter", text) from error
            time.sleep(PAUSE_S)


def _try_to_join(rendezvous: Rendezvous, hello: Hello, until: float) -> tuple[Link[FromCoordinator], str]:
    """One try. Raises PeerGoneError where another may help."""
    link, name = rendezvous.call(max(0.1, until - time.monotonic()))
    try:
        link.trust()
        link.send(hello)
        answer = link.receive(max(0.1, until - time.monotonic()))
        if answer != Proceed(0, "enter"):
            raise WireError(f"{type(answer).__name__} came where Proceed was expected")
    except BaseException as error:
        link.close()
        if isinstance(error, TimeoutError | WireError):
            raise failure(0, name, "enter", str(error)) from error
        raise
    return link, name
