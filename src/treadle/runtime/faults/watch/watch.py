"""The watch as the main thread uses it.

watch = Watch.join([pp, dp], gather, rank=rank, name=name, deadline_s=60.0)
watch.on_alarm(sockets.shut)
slots = watch.slots
...
slots[OP], slots[WAITS_FOR] = op, peer              # at each op
if watch.alarm is not None:                         # between ops
    raise watch.noticed()
try:
    work.wait(timeout)
except RuntimeError as error:
    raise watch.failed(error, "B1.0 from rank 1") from error
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize

from treadle.dist.addresses import own_address
from treadle.dist.errors import OWN_ERRORS
from treadle.host.processes import ended
from treadle.runtime.faults.progress.progress_page import PageReader, ProgressPage, namespace_id
from treadle.runtime.faults.progress.wait_target import NOBODY
from treadle.runtime.faults.watch.contacts import Contact, exchange
from treadle.runtime.faults.watch.links import Neighbour, NeighbourLink, call, open_listener
from treadle.runtime.faults.watch.loss import Naming, RankLostError, from_network, timed_out
from treadle.runtime.faults.watch.loss_messages import (
    MOST_TEXT,
    TOKEN_BYTES,
    UNKNOWN,
    LossKind,
    Lost,
    WaitFailure,
    WaitState,
)
from treadle.runtime.faults.watch.transport import Transport
from treadle.runtime.faults.watch.watchdog import Watchdog

LINGER_S = 1.0
"""How long a rank that finds another lost when they meet waits for its other neighbours, to let them know."""

MEET_S = 30.0
"""How long neighbours may take to connect once all have exchanged their contacts, which takes a deadline at most."""

MEETING_S, ASK_S = 0.05, 0.5
"""How often a rank that waits for neighbours to connect looks for losses, and asks whether they are still coming."""

REPORT_S = 1.0
"""How long a report of a death may take after a peer has closed; if none has come, every rank is asked."""

ANSWER_S = 1.0
"""How long a request for states may take until the loss behind it is known on every rank."""

TELL_S = 1.0
"""How long a rank waits until its own error has been handed to its neighbours."""


class Watch:
    """One rank's watch over the others."""

    def __init__(self, watchdog: Watchdog, transport: Transport, progress: ProgressPage) -> None:
        self._watchdog, self._transport, self._progress = watchdog, transport, progress
        self.slots = progress.slots
        # Also at exit, of a multiprocessing child too, so that a normal end is not taken for a death.
        self._close = Finalize(self, _close, args=(watchdog, progress), exitpriority=100)

    @classmethod
    def join(
        cls,
        rings: Sequence[Sequence[int]],
        gather: Callable[[str, Sequence[int]], Sequence[str]],
        *,
        rank: int,
        name: Naming,
        deadline_s: float,
        address: str | None = None,
        waited: Sequence[Sequence[int]] | None = None,
        meeting: Callable[[], None] = lambda: None,
    ) -> Watch:
        """Connects to the neighbours in each ring; all ranks of a ring call it, with rings in one order.

        `gather(text, ranks)` returns what each of `ranks` gave as text, in their order.
        `name(rank, op)` is the text of an op of any rank. A rank that is silent for `deadline_s` is lost. `address` is
        where neighbours can reach this process, for hosts where the address from which the store is reached is not the
        one. `waited` are the ranks that a collective may wait for, those of each ring if not given. `meeting` is
        called now and then until all neighbours have connected, and may raise.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        progress = ProgressPage(int.from_bytes(token[:8], "little", signed=True))
        listener = open_listener(address if address is not None else own_address())
        called: dict[int, NeighbourLink] = {}
        try:
            host, port = listener.server.getsockname()[:2]
            ids = namespace_id("pid"), namespace_id("net")
            own = Contact(rank, host, port, os.getpid(), progress.fd, token, *ids)
            contacts = exchange(rings, own, gather)
            for other in sorted(contacts):
                try:
                    called |= {other: call(contacts[other], rank)} if other < rank else {}
                except ConnectionError:
                    if not _has_ended(own, contacts[other]):
                        raise
        except BaseException:
            progress.close()
            listener.close()
            for link in called.values():
                link.socket.close()
            raise
        neighbours = [Neighbour(other, _page_reader(own, other)) for other in contacts.values()]
        watchdog = Watchdog(rank, progress, waited if waited is not None else rings, deadline_s, name)
        watch = cls(watchdog, watchdog.start(neighbours, listener, token, called), progress)
        for ended_before in (other for other in neighbours if _has_ended(own, other.contact)):
            watchdog.do(partial(watchdog.miss, ended_before, died=True))
        watch._wait_until_met(meeting)
        return watch

    def wait_for(self, waited: Sequence[Sequence[int]]) -> None:
        """Takes the ranks that collectives may wait for, where they were not known to `join`."""
        self._watchdog.groups = waited

    @property
    def alarm(self) -> RankLostError | None:
        """The loss of a rank once it is known, else None. To raise it, take it from `noticed`."""
        return self._watchdog.alarm

    def on_alarm(self, unblock: Callable[[], None]) -> None:
        """Has the watch's thread call `unblock` on alarm, to get a blocked main thread out of a native wait."""
        self._watchdog.on_alarm(unblock)

    def noticed(self) -> RankLostError:
        """Returns the alarm, to be raised by the main thread, whose process will not be ended from now on."""
        self._watchdog.acknowledged = True
        lost = self._watchdog.incident.first_loss
        assert lost is not None
        return self._watchdog.describe(lost)

    def failed(self, error: BaseException, waiting_for: str) -> RankLostError:
        """Finds the rank behind a wait that raised `error`, and returns the error to raise from it.

        A rank at an op that waits for no other has waited for itself; it reports that before it leaves.
        """
        cause = WaitFailure.TIMED_OUT if timed_out(error) else WaitFailure.CLOSED
        if cause is WaitFailure.TIMED_OUT and self._progress.look().waits_for == NOBODY:
            cause = WaitFailure.STUCK
        self._find_out(cause)
        self._watchdog.acknowledged = True
        lost = self._watchdog.incident.first_loss or self._nobody_told(cause)
        return self._watchdog.describe(lost, waiting_for)

    def raised(self, error: BaseException) -> None:
        """Tells every rank that this rank's own work raised `error`.

        A network error is probably the echo of another loss, so every rank is asked for its state first.
        """
        secondhand = from_network(error) and not isinstance(error, OWN_ERRORS)
        if secondhand and not isinstance(error, RankLostError):
            self._find_out(WaitFailure.TIMED_OUT if timed_out(error) else WaitFailure.CLOSED)
        self._watchdog.acknowledged = True
        if isinstance(error, RankLostError) or self.alarm is not None or not self._watchdog.is_alive:
            return
        text = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        incident, own = self._watchdog.incident, self._watchdog.own()  # now: the step's end clears the page
        lose = partial(incident.lose, LossKind.RAISED, own, text=text, secondhand=secondhand)
        self._watchdog.do(lambda: lose(time.monotonic())).wait(TELL_S)

    def await_alarm(self) -> None:
        """Waits until what this rank has reported is settled among all ranks."""
        if self._watchdog.is_alive:
            self._watchdog.alarmed.wait(ANSWER_S)

    def close(self) -> None:
        """Sends a goodbye and closes everything. May be called again."""
        self._close()

    def _find_out(self, cause: WaitFailure) -> None:
        """Waits until the loss is known: reported by another rank, or found by asking for states.

        A rank whose wait failed goes on asking until all others' waits should have ended: one of them may hang.
        """
        watchdog = self._watchdog
        watchdog.failed = WaitState.CLOSED if cause is WaitFailure.CLOSED else WaitState.TIMED_OUT
        waits = self._progress.look().waits_for != NOBODY
        until = time.monotonic() + (3 * ANSWER_S + (watchdog.deadline_s if waits else 0.0))
        if cause is WaitFailure.CLOSED and watchdog.is_alive:
            watchdog.alarmed.wait(REPORT_S)
        while not watchdog.alarmed.is_set() and watchdog.is_alive and time.monotonic() < until:
            watchdog.do(lambda: watchdog.incident.ask(cause, time.monotonic()))
            watchdog.alarmed.wait(ANSWER_S)

    def _nobody_told(self, cause: WaitFailure) -> Lost:
        """Returns the loss to name if no rank has reported one: the rank waited for, or this one, cut off or stuck."""
        here, rank = self._progress.look(), self._watchdog.rank
        named = here.waits_for if here.waits_for >= 0 else rank
        hung = cause is WaitFailure.STUCK or (cause is WaitFailure.TIMED_OUT and named != rank)
        op = here.op if cause is WaitFailure.STUCK else UNKNOWN
        return Lost(rank, 0, named, LossKind.HUNG if hung else LossKind.CUT, op, here.step, time.time_ns(), 0)

    def _wait_until_met(self, meeting: Callable[[], None]) -> None:
        met, most_s = self._transport.met, self._watchdog.deadline_s + MEET_S
        begun = asked = time.monotonic()
        try:
            while not met.wait(MEETING_S) and self.alarm is None and (now := time.monotonic()) < begun + most_s:
                if now - asked >= ASK_S:
                    asked = now
                    meeting()
            if met.is_set():
                return
            missing = self._transport.missing()
            if self.alarm is None:
                raise TimeoutError(
                    f"rank {self._watchdog.rank} waited {most_s:g} s for ranks {', '.join(map(str, missing))} to "
                    "connect; can they reach its address, or does it need address=?"
                )
            until = time.monotonic() + LINGER_S
            while set(self._transport.missing()) - {self.alarm.rank} and time.monotonic() < until:
                met.wait(MEETING_S)
            raise self.alarm
        except BaseException:
            self.close()
            raise


def _has_ended(own: Contact, other: Contact) -> bool:
    """True if the process of a rank of this host has ended; of another host, nobody here can see it."""
    return other.host == own.host and ended(other.pid)


def _page_reader(own: Contact, other: Contact) -> PageReader | None:
    return PageReader.open(other.pid, other.progress_fd, other.mark) if other.host == own.host else None


def _close(watchdog: Watchdog, progress: ProgressPage) -> None:
    watchdog.acknowledged = True
    watchdog.leave()
    progress.close()
