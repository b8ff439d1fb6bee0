"""The coordinator: one thread that hears all update ranks, moves attempts from phase to phase, and decides.

It talks to update ranks only, wherever they are; each of them speaks for the worker beside it. A rank whose connection
ends is lost, and the attempt with it.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

import msgspec

from weft.update.attempt import Attempt, Refusal
from weft.update.lateness import why_late
from weft.update.ledger import Ledger, peek
from weft.update.wire.control import (
    Agreed,
    Enter,
    Fault,
    Go,
    Join,
    Phase,
    Proceed,
    Settled,
    Sides,
    Stop,
    ToCoordinator,
)
from weft.update.wire.doors import Door
from weft.update.wire.errors import WireError, WrongKey
from weft.update.wire.link import HELLO_S, PAUSE_S, Link, encode
from weft.update.wire.messages import PROTOCOL

HEAR_S = 1.0
"""How long ranks that waited in vain are heard, before those that say nothing are blamed."""

_AFTER: dict[Phase, Phase] = {"plan": "begin", "begin": "finish", "finish": "open", "open": "enter"}


class Coordinator:
    """Serves until it is closed. `deadline_s` is how long ranks may be apart in a phase."""

    def __init__(self, door: Door, ledger: Ledger, world: int, deadline_s: float) -> None:
        self.door, self.ledger, self.world, self.deadline_s = door, ledger, world, deadline_s
        self._ranks: dict[int, Link[ToCoordinator]] = {}
        self._strangers: dict[Link[ToCoordinator], float] = {}  # until when they may say who they are
        self._lost: dict[int, str] = {}
        self._foreign = ""  # who came with another key
        self._sides: dict[int, Sides] = {}
        self._known: dict[int, tuple[str, str]] = {}  # each rank's layouts, as everybody knows them
        self._attempt = Attempt(world)
        self._since: float | None = None
        self._waited: dict[int, Fault] = {}
        self._judged_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()
        self._selector.register(self.door.server, selectors.EVENT_READ, None)
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weft coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; ranks that are still there see their connection end."""
        self._closing = True
        with suppress(OSError):  # it has ended already
            self._wake[1].send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._left_s()):
                    if key.fileobj is self.door.server:
                        self._accept()
                    elif key.data is not None:
                        self._hear(key.data)
                self._check_deadline()
        finally:
            for link in (*self._ranks.values(), *self._strangers):
                link.close()
            self.door.close()
            for end in self._wake:
                end.close()
            self._selector.close()
            self.ledger.close()

    # ---- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            link: Link[ToCoordinator] | None = self.door.accept(ToCoordinator)
        except OSError:  # no descriptors left, for now
            time.sleep(PAUSE_S)
            return
        if link is None:
            return
        if len(self._strangers) > self.world:
            self._lose(next(iter(self._strangers)), "others have come")
        self._strangers[link] = time.monotonic() + HELLO_S
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _hear(self, link: Link[ToCoordinator]) -> None:
        """All that has come over a connection so far; its selector does not know of what was read already."""
        while link in self._strangers or link in self._ranks.values():
            try:
                message = link.receive(0)
                if link in self._strangers:
                    self._join(link, message)
                    continue
            except TimeoutError:
                return
            except (OSError, WireError) as error:
                if isinstance(error, WrongKey):
                    self._turn_away(link, error)
                self._lose(link, str(error))
                return
            self._take(next(rank for rank, other in self._ranks.items() if other is link), message)

    def _join(self, link: Link[ToCoordinator], join: ToCoordinator) -> None:
        if not isinstance(join, Join) or (join.protocol, join.world) != (PROTOCOL, self.world):
            raise WireError(f"a connection begins with Join of protocol {PROTOCOL} and world {self.world}, got {join}")
        if not 0 <= join.rank < self.world or join.rank in self._ranks:
            raise WireError(f"there is no place for update rank {join.rank} of {self.world}")
        link.trust()
        del self._strangers[link]
        self._ranks[join.rank] = link
        link.peer = f"process {join.pid}" + (f" on {join.host}" if not link.pid else "")
        self._lost.pop(join.rank, None)
        if len(self._ranks) == self.world:
            self._foreign = ""
        self._known.clear()  # a rank that is new knows nobody's layout

    def _turn_away(self, link: Link[ToCoordinator], error: WrongKey) -> None:
        """Any message shows the other end, too, that the keys differ; ranks that are missed hear of it later."""
        self._foreign = f"; {link.peer} was turned away: {error}"
        with suppress(OSError):
            link.send(Stop(0, Fault(0, "the coordinator", "enter", -1, str(error)), committed=False), timeout_s=0)

    def _lose(self, link: Link[ToCoordinator], text: str) -> None:
        self._selector.unregister(link.connection)
        rank = next((rank for rank, other in self._ranks.items() if other is link), None)
        self._strangers.pop(link, None)
        if rank is not None:
            del self._ranks[rank]
            self._lost[rank] = f"update rank {rank} ({link.peer})"
        link.close()
        if rank is not None and self._attempt.entered:
            self._stop(self._attempt.fault(self._lost[rank], f"lost: {text}"))

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _take(self, rank: int, message: ToCoordinator) -> None:
        attempt = self._attempt
        if isinstance(message, Enter):
            if self._lost:
                gone = ", ".join(self._lost.values())
                text = "lost in an earlier attempt; start the update ranks again"
                self._tell(rank, encode(Stop(0, Fault(0, gone, "enter", -1, text), committed=False)))
                return
            if attempt.phase != "enter":  # it has given the attempt up
                text = "has given up, and begins another attempt"
                self._stop(attempt.fault(f"update rank {rank}", text))
                attempt = self._attempt
            attempt.entered[rank] = message
        elif isinstance(message, Join) or message.epoch != attempt.epoch or not attempt.epoch:
            return  # of an attempt that is over
        elif isinstance(message, Fault):
            self._accuse(rank, message)
            return
        elif isinstance(message, Settled):
            attempt.settled[rank] = message
        elif isinstance(message, Sides):
            self._sides[rank] = message
        elif isinstance(message, Agreed) and message.phase == attempt.phase:
            attempt.agreed[rank] = message
        self._since = self._since if self._since is not None else time.monotonic()
        if not attempt.missing(self._sides):
            self._since = None
            try:
                self._advance()
            except Refusal as refusal:
                self._stop(attempt.fault(refusal.who, str(refusal)))
            except (OSError, WireError) as error:
                self._stop(attempt.fault("the coordinator (update rank 0)", f"{type(error).__name__}: {error}"))

    def _accuse(self, rank: int, fault: Fault) -> None:
        """Stops the attempt. Ranks that waited for others in vain are heard first: who says nothing was waited for."""
        if not fault.waited:
            self._stop(fault)
            return
        if not self._waited:
            self._judged_s = time.monotonic() + HEAR_S
        self._waited[rank] = fault
        if len(self._waited) == self.world:
            self._judge()

    def _judge(self) -> None:
        rank, fault = next(iter(self._waited.items()))
        silent = [other for other in self._ranks if other not in self._waited]
        if not silent:
            self._stop(fault)
            return
        who = ", ".join(f"update rank {other} ({self._ranks[other].peer})" for other in silent)
        aside = why_late(*(self._ranks[other].pid for other in silent))
        text = f"says nothing{aside}; update rank {rank} waited for it: {fault.text}"
        self._stop(Fault(fault.epoch, who, fault.phase, fault.bucket, text))

    def _advance(self) -> None:
        """Everybody has spoken in this phase."""
        attempt = self._attempt
        if attempt.phase == "enter":
            attempt.refuse_entries(self.ledger.record)
            attempt.epoch = self.ledger.begin(attempt.next_epoch())
            attempt.phase = "settle"
            record = self.ledger.record
            self._tell_all(Go(attempt.epoch, record.version, record.epochs))
        elif attempt.phase == "settle":
            if attempt.digests == self._known:
                self._lay_out(None)
            else:
                attempt.phase = "layout"
                self._sides.clear()
                for rank, send in attempt.sends().items():
                    self._tell(rank, encode(send))
        elif attempt.phase == "layout":
            self._lay_out(attempt.catalogue(self._sides))
            self._sides.clear()
        else:
            self._agree()

    def _lay_out(self, catalogue: bytes | None) -> None:
        attempt = self._attempt
        layouts = attempt.layouts(self.ledger.record, catalogue)
        if layouts is None:
            self._done("open")
        else:
            attempt.phase = "plan"
            if catalogue is not None:
                self._known = {}  # until all have made their plans of it
            self._tell_all(layouts)

    def _agree(self) -> None:
        attempt, phase = self._attempt, self._attempt.phase
        different = attempt.disagreement()
        if different is not None:
            raise Refusal("the update ranks", different)
        if phase == "plan":
            self._known = attempt.digests
        if phase == "finish":
            first, record = attempt.first, self.ledger.record
            version = first.version if first.kind == "update" else record.version
            assert version is not None
            self._commit(version)
            attempt.committed = True
        attempt.agreed.clear()
        if phase == "open":
            self._done(phase)
        else:
            attempt.phase = _AFTER[phase]
            self._tell_all(Proceed(attempt.epoch, phase))

    def _commit(self, version: int) -> None:
        """From here on it is decided. Where that cannot be told, this thread ends, and workers stay closed."""
        try:
            self.ledger.commit(version, self._attempt.epoch)
        except OSError as error:
            if self._attempt.epoch in peek(self.ledger.directory).epochs:
                raise RuntimeError(f"version {version} is committed, but that may not outlast this host") from error
            raise

    def _done(self, phase: Phase) -> None:
        self._tell_all(Proceed(self._attempt.epoch, phase))
        self._attempt = Attempt(self.world)

    def _stop(self, fault: Fault) -> None:
        stop = Stop(self._attempt.epoch, fault, self._attempt.committed)
        self._attempt, self._since = Attempt(self.world), None
        self._waited.clear()
        self._tell_all(stop)

    def _tell_all(self, message: msgspec.Struct) -> None:
        body = encode(message)  # once: it may be the layouts of a large model
        for rank in list(self._ranks):
            self._tell(rank, body)

    def _tell(self, rank: int, body: bytes) -> None:
        with suppress(OSError):  # its end is heard by the selector, and told then
            self._ranks[rank].send_encoded(body, timeout_s=self.deadline_s)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _left_s(self) -> float | None:
        """Ranks report who keeps them by their own deadlines; this one is for a rank that says nothing at all."""
        ends = list(self._strangers.values())
        if self._since is not None:
            ends.append(self._since + self.deadline_s + 1)
        if self._waited:
            ends.append(self._judged_s)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _check_deadline(self) -> None:
        for link in [link for link, until in self._strangers.items() if time.monotonic() > until]:
            self._lose(link, f"nothing came within {HELLO_S:g} s")
        if self._waited and time.monotonic() > self._judged_s:
            self._judge()
        if self._since is not None and time.monotonic() > self._since + self.deadline_s + 1:
            missing = self._attempt.missing(self._sides)
            who = ", ".join(f"update rank {rank}" for rank in missing)
            why = self._foreign or why_late(*(self._ranks[rank].pid for rank in missing if rank in self._ranks))
            text = f"not heard of within {self.deadline_s:g} s of the others{why}"
            self._stop(self._attempt.fault(who, text))
