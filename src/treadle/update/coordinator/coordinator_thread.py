"""The coordinator: one thread that hears all update ranks and does what `protocol/coordinator.py` decides.

It talks to update ranks only, wherever they are; each of them speaks for the worker beside it. A rank whose connection
ends is lost, and the attempt with it.

    RankLinks ── message ──> protocol.hear ──> actions: Tell   a message to some ranks
    (rank_links.py)                                     Open   number the attempt        (commit_log.py)
                                                        Decide write the decision        (commit_log.py)
"""

from __future__ import annotations

import threading
import time

from treadle.host.boot_clock import boot_ns
from treadle.update.coordinator.commit_log import CommitLog, peek
from treadle.update.coordinator.late_ranks import WaitReports, late_ranks
from treadle.update.coordinator.rank_links import RankLink, RankLinks
from treadle.update.protocol import coordinator_decisions as protocol
from treadle.update.protocol.attempt import Attempt
from treadle.update.protocol.control import Fault, ToCoordinator
from treadle.update.protocol.leases import leases_of
from treadle.update.protocol.update_messages import Status
from treadle.update.update_options import UpdateOptions
from treadle.wire.codec import encode
from treadle.wire.errors import MalformedError, WireError
from treadle.wire.listeners import Listener

GRACE_S = 1.0
"""Ranks report who keeps them waiting by their own deadlines; the coordinator's is this much later."""


class Coordinator:
    """Runs until it is closed. No attempt begins before `agents` agents have joined."""

    def __init__(
        self, listener: Listener[RankLink], ledger: CommitLog, world: int, options: UpdateOptions, agents: int = 0
    ) -> None:
        self.listener, self.ledger, self.world = listener, ledger, world
        self.deadline_s = options.phase_s
        """How long after the first rank the last may report in a phase."""
        self.links = RankLinks(listener, world)
        before = ledger.record
        ledger.lead(options.lease_ns)  # until its term is on disk an earlier coordinator grants leases
        leases = leases_of(before, options.lease_ns, options.least, boot_ns())
        where, last = str(ledger.directory), ledger.attempt
        self._state = protocol.CoordinatorState(
            world, Attempt(world), where, leases=leases, last=last, expected=agents, options=options
        )
        self._since: float | None = None
        self._waited = WaitReports()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="treadle coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; ranks that are still there see their connection end."""
        self._closing = True
        self.links.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                for link in self.links.ready(self._left_s()):
                    self._hear(link)
                self.links.accept()
                self._check_time()
        finally:
            self.links.close()
            self.ledger.close()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _hear(self, link: RankLink) -> None:
        """Take all messages that have come; the selector does not know of those that were read ahead."""
        while self.links.is_open(link):
            rank = self.links.rank_of(link)
            try:
                message = link.receive(0)
                if rank is None:
                    self._carry_out(protocol.joined(self._state, self.links.join(link, message)))
                    continue
            except TimeoutError:
                return
            except MalformedError as error:
                if rank is None:
                    self._lose(link, error)
                    return
                who = f"update rank {rank} ({link.peer})"
                self._carry_out(protocol.malformed(self._state, rank, who, str(error), self.ledger.record))
                continue
            except (OSError, WireError) as error:
                self._lose(link, error)
                return
            self._take(rank, message)

    def _lose(self, link: RankLink, error: Exception) -> None:
        rank = self.links.drop(link, error)
        if rank is not None:
            name = f"update rank {rank} ({link.peer})"
            self._carry_out(protocol.lost(self._state, rank, name, str(error), self.ledger.record, boot_ns()))

    def _take(self, rank: int, message: ToCoordinator) -> None:
        if isinstance(message, Status) and self.ledger.is_lost:
            return  # whoever leads the log now knows of no lease that is granted from here on
        if not isinstance(message, Fault) or message.epoch != self._state.attempt.epoch or not message.epoch:
            self._carry_out(protocol.hear(self._state, rank, message, self.ledger.record, boot_ns()))
        elif message.waited:
            self._waited.add(rank, message)
            self._judge()
        else:
            self._stop(message)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, step: protocol.Step) -> None:
        """Do what was decided, in order. What the log answers leads to more."""
        before = self._state.attempt
        self._state, actions = step
        self._mind_time(before)
        for action in actions:
            if isinstance(action, protocol.Tell):
                self._tell(action)
            else:
                self._carry_out(self._write(action))

    def _tell(self, tell: protocol.Tell) -> None:
        body = encode(tell.message)  # once: it may be the layouts of a large model
        for rank in tell.ranks:
            self.links.tell(rank, body, self.deadline_s)

    def _write(self, action: protocol.Open | protocol.Decide) -> protocol.Step:
        """Write to the log. A log that cannot be written ends the attempt."""
        try:
            if isinstance(action, protocol.Open):
                epoch = self.ledger.begin(action.least, action.record, action.members)
                return protocol.opened(self._state, epoch, self.ledger.record)
            self._commit(action.version)
            return protocol.decided(self._state)
        except OSError as error:
            return protocol.stop(self._state, protocol.fault_of_log(self._state, error))

    def _commit(self, version: int) -> None:
        """Point of no return. If the write may not have survived, crash the coordinator; workers stay closed."""
        try:
            self.ledger.commit(version, self._state.attempt.epoch)
        except OSError as error:
            if self._state.attempt.epoch in peek(self.ledger.directory).epochs:
                raise RuntimeError(f"version {version} is committed, but that may not outlast this host") from error
            raise

    def _stop(self, fault: Fault) -> None:
        self._waited.clear()
        self._carry_out(protocol.stop(self._state, fault))

    # ---- time --------------------------------------------------------------------------------------------------------

    def _mind_time(self, before: Attempt) -> None:
        """Start the clock of a phase when the first rank has reported in it; stop it when all have."""
        attempt = self._state.attempt
        waits_for_first = self._state.num_spoken == 0 and (attempt.own is None or attempt.phase != "enter")
        if waits_for_first or self._state.is_complete:
            self._since = None
        elif self._since is None or (before.epoch, before.phase) != (attempt.epoch, attempt.phase):
            self._since = time.monotonic()
        if not attempt.entered:
            self._waited.clear()

    @property
    def _phase_deadlines(self) -> list[float]:
        return [self._since + self.deadline_s + GRACE_S] if self._since is not None else []

    def _left_s(self) -> float | None:
        """Seconds to the next deadline; None where there is none."""
        ends = [*self.links.deadlines, *self._phase_deadlines, *self._waited.deadlines]
        if self._state.waits_ns:
            ends.append(time.monotonic() + (self._state.waits_ns - boot_ns()) / 1e9)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _check_time(self) -> None:
        for stranger, why in self.listener.overdue():
            self.links.drop(stranger, why)
        self._judge()
        self._carry_out(protocol.ticked(self._state, self.ledger.record, boot_ns()))
        if any(time.monotonic() > until for until in self._phase_deadlines):
            self._end_phase()

    def _end_phase(self) -> None:
        """Go on without agents that are late, where the policy allows that; else end the attempt."""
        who, text = late_ranks(self._state.missing, self.links, self.deadline_s)
        step = protocol.leave_out(self._state, text, self.ledger.record, boot_ns())
        if step is not None:
            self._carry_out(step)
        elif self._state.num_awaited:
            joined = f"{len(self._state.agents)} of {self._state.expected} have joined within {self.deadline_s:g} s"
            text = f"{joined}; start one beside each worker (treadle agent)"
            self._stop(self._state.attempt.fault("the agents", text))
        else:
            self._stop(self._state.attempt.fault(who, text))

    def _judge(self) -> None:
        cast = self._state.attempt.cast
        if self._waited.is_due(len(cast)):
            self._stop(self._waited.verdict(self.links, cast))
