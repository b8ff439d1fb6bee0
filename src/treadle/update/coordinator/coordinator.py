"""The coordinator: one thread that hears all update ranks and does what `protocol/coordinator.py` decides.

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

from treadle.host.lateness import why_late
from treadle.update.coordinator.attempt import Attempt
from treadle.update.coordinator.commit_log import CommitLog, peek
from treadle.update.protocol import coordinator as protocol
from treadle.update.protocol.control import Fault, Join, Stop, ToCoordinator
from treadle.update.protocol.messages import PROTOCOL
from treadle.wire.codec import encode
from treadle.wire.errors import WireError, WrongKeyError
from treadle.wire.link import HELLO_S, PAUSE_S, Link
from treadle.wire.listeners import Listener

HEAR_S = 1.0
"""How long ranks that waited in vain are heard, before those that say nothing are blamed."""


class Coordinator:
    """Serves until it is closed. `deadline_s` is how long ranks may be apart in a phase."""

    def __init__(self, door: Listener, ledger: CommitLog, world: int, deadline_s: float) -> None:
        self.door, self.ledger, self.world, self.deadline_s = door, ledger, world, deadline_s
        self._ranks: dict[int, Link[ToCoordinator]] = {}
        self._strangers: dict[Link[ToCoordinator], float] = {}  # until when they may say who they are
        self._foreign = ""  # who came with another key
        self._state = protocol.CoordinatorState(world, Attempt(world), str(ledger.directory))
        self._since: float | None = None
        self._waited: dict[int, Fault] = {}
        self._judged_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()
        self._selector.register(self.door.server, selectors.EVENT_READ, None)
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="treadle coordinator", daemon=True)
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
                if isinstance(error, WrongKeyError):
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
        if len(self._ranks) == self.world:
            self._foreign = ""
        self._state = protocol.joined(self._state, join.rank)

    def _turn_away(self, link: Link[ToCoordinator], error: WrongKeyError) -> None:
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
        link.close()
        if rank is not None:
            self._carry_out(protocol.lost(self._state, rank, f"update rank {rank} ({link.peer})", text))

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _take(self, rank: int, message: ToCoordinator) -> None:
        if isinstance(message, Fault) and message.epoch == self._state.attempt.epoch != 0:
            self._accuse(rank, message)
        else:
            self._carry_out(protocol.hear(self._state, rank, message, self.ledger.record))

    def _carry_out(self, step: protocol.Step) -> None:
        """Does what was decided, in its order; what the log answers leads to more."""
        before = self._state.attempt
        self._state, actions = step
        self._mind_time(before)
        for action in actions:
            if isinstance(action, protocol.Tell):
                if action.rank < 0:
                    self._tell_all(action.message)
                else:
                    self._tell(action.rank, encode(action.message))
                continue
            try:
                if isinstance(action, protocol.Open):
                    epoch = self.ledger.begin(action.least, action.record, action.members)
                    after = protocol.opened(self._state, epoch, self.ledger.record)
                else:
                    self._commit(action.version)
                    after = protocol.decided(self._state)
            except OSError as error:
                after = protocol.stop(self._state, protocol.fault_of_log(self._state, error))
            self._carry_out(after)

    def _mind_time(self, before: Attempt) -> None:
        """A phase is late from when the first rank has spoken in it."""
        attempt = self._state.attempt
        if self._state.num_spoken in (0, self.world):
            self._since = None
        elif self._since is None or (before.epoch, before.phase) != (attempt.epoch, attempt.phase):
            self._since = time.monotonic()
        if not attempt.entered:
            self._waited.clear()

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

    def _commit(self, version: int) -> None:
        """From here on it is decided. Where that cannot be told, this thread ends, and workers stay closed."""
        try:
            self.ledger.commit(version, self._state.attempt.epoch)
        except OSError as error:
            if self._state.attempt.epoch in peek(self.ledger.directory).epochs:
                raise RuntimeError(f"version {version} is committed, but that may not outlast this host") from error
            raise

    def _stop(self, fault: Fault) -> None:
        self._waited.clear()
        self._carry_out(protocol.stop(self._state, fault))

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
            missing = self._state.missing
            who = ", ".join(f"update rank {rank}" for rank in missing)
            why = self._foreign or why_late(*(self._ranks[rank].pid for rank in missing if rank in self._ranks))
            text = f"not heard of within {self.deadline_s:g} s of the others{why}"
            self._stop(self._state.attempt.fault(who, text))
