"""What the main thread calls.

watch = Watch.join([pp, dp], rank=rank, name=name, deadline_s=60.0)
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
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize

import torch

from treadle.dist.addresses import own_address
from treadle.runtime.faults.progress.page import COMPUTING, PageReader, ProgressPage, namespace_id
from treadle.runtime.faults.watch.contacts import Contact, GatherGroup, exchange
from treadle.runtime.faults.watch.links import Neighbour, call, open_door
from treadle.runtime.faults.watch.loss import Naming, RankLostError, from_network, rank_lost, timed_out
from treadle.runtime.faults.watch.messages import MOST_TEXT_BYTES, UNKNOWN, LossKind, Lost, WaitFailure, WaitState
from treadle.runtime.faults.watch.transport import Transport
from treadle.runtime.faults.watch.watchdog import Watchdog

MEET_S = 30.0
"""How long neighbours may take to connect, once all have exchanged their cards."""

NEWS_S = 1.0
"""How soon news of a death is there, after a peer has closed; if there is none by then, everyone is asked."""

ANSWER_S = 1.0
"""How long an ask may take until its verdict is known everywhere."""

TELL_S = 1.0

_CPU = torch.device("cpu")


def waits_for_group(index: int) -> int:
    """What to write into slot WAITS_FOR while waiting for all other ranks of `waited[index]`, as in a collective."""
    return -2 - index


class Watch:
    """One rank's eye on the others."""

    def __init__(self, sentry: Watchdog, post: Transport, progress: ProgressPage, describe: _Describe) -> None:
        self._sentry, self._post, self._progress, self._describe = sentry, post, progress, describe
        self.slots = progress.slots
        # Also at exit, of a multiprocessing child too, so that a normal end is not taken for a death.
        self._close = Finalize(self, _close, args=(sentry, progress), exitpriority=100)
        _close_copies_in_children(post)

    @classmethod
    def join(
        cls,
        groups: Sequence[GatherGroup],
        *,
        rank: int,
        name: Naming,
        deadline_s: float,
        device: torch.device = _CPU,
        address: str | None = None,
        waited: Sequence[Sequence[int]] | None = None,
    ) -> Watch:
        """Meets the neighbours in the ring of each group; all ranks of a group call it, with groups in one order.

        `name(rank, op)` is the text of an op of any rank. A rank that is silent for `deadline_s` is lost. `device` is
        where tensors must be to be gathered over the groups. `address` is where neighbours can reach this process,
        for hosts where the address from which the store is reached is not the one. `waited` are the ranks that a
        collective may wait for, those of each group if not given.
        """
        token = secrets.token_bytes(16)
        progress = ProgressPage(int.from_bytes(token[:8], "little", signed=True))
        door = open_door(address if address is not None else own_address())
        called: dict[int, socket.socket] = {}
        try:
            host, port = door.getsockname()[:2]
            ids = namespace_id("pid"), namespace_id("net")
            card = Contact(rank, host, port, os.getpid(), progress.fd, token, *ids)
            cards = exchange(groups, card, device)
            called |= {other: call(cards[other], rank) for other in cards if other < rank}
        except BaseException:
            progress.close()
            for opened in (door, *called.values()):
                opened.close()
            raise
        neighbours = [Neighbour(other, _onlooker(card, other)) for other in cards.values()]
        describe = _Describe(rank, progress, name, deadline_s)
        waited = waited if waited is not None else [group.ranks for group in groups]
        sentry = Watchdog(rank, progress, waited, deadline_s, describe)
        watch = cls(sentry, sentry.start(neighbours, door, token, called), progress, describe)
        watch._wait_until_met()
        return watch

    @property
    def alarm(self) -> RankLostError | None:
        """The loss of a rank, once it is known; None while all is well. To raise it, take it from `noticed`."""
        return self._sentry.alarm

    def on_alarm(self, unblock: Callable[[], None]) -> None:
        """Has `unblock` called in the watch's thread on alarm, to get a blocked main thread out of a native wait."""
        self._sentry.on_alarm(unblock)

    def noticed(self) -> RankLostError:
        """The alarm, to be raised by the main thread, which from now on is left alone to unwind."""
        self._sentry.acknowledged = True
        assert self.alarm is not None
        lost = self._sentry.case.verdict
        return self._describe(lost) if lost is not None else self.alarm

    def failed(self, error: BaseException, waiting_for: str) -> RankLostError:
        """A wait raised: finds out which rank is behind it, and returns the error to raise `from error`.

        A rank that is at an op which waits for nobody has waited for itself, and says so before it leaves.
        """
        cause = WaitFailure.TIMED_OUT if timed_out(error) else WaitFailure.CLOSED
        if cause is WaitFailure.TIMED_OUT and self._progress.look().waits_for == COMPUTING:
            cause = WaitFailure.STUCK
        self._find_out(cause)
        self._sentry.acknowledged = True
        lost = self._sentry.case.verdict if self._sentry.alarm is not None else None
        return self._describe(lost if lost is not None else self._nobody_told(cause), waiting_for)

    def raised(self, error: BaseException) -> None:
        """Tells everyone that this rank's own work raised, before the error goes on up.

        An error that the network made is not taken for the first: first everyone is asked who is behind it.
        """
        secondhand = from_network(error)
        if secondhand and not isinstance(error, RankLostError):
            self._find_out(WaitFailure.TIMED_OUT if timed_out(error) else WaitFailure.CLOSED)
        self._sentry.acknowledged = True
        if isinstance(error, RankLostError) or self.alarm is not None or not self._sentry.is_alive:
            return
        text = f"{type(error).__name__}: {error}"[:MOST_TEXT_BYTES]
        case, own = self._sentry.case, self._sentry.own
        tell = self._sentry.do(lambda now: case.lose(LossKind.RAISED, own(), now, text=text, secondhand=secondhand))
        tell.wait(TELL_S)

    def close(self) -> None:
        """Says goodbye and closes everything. May be called again."""
        self._close()

    def _find_out(self, cause: WaitFailure) -> None:
        """Waits until the alarm is known: told by others, or found by asking.

        A rank that waits asks on until all others' waits have had their time, as one of them may be no wait.
        """
        sentry = self._sentry
        sentry.failed = WaitState.CLOSED if cause is WaitFailure.CLOSED else WaitState.TIMED_OUT
        waits = self._progress.look().waits_for != COMPUTING
        until = time.monotonic() + (3 * ANSWER_S + (sentry.deadline_s if waits else 0.0))
        if cause is WaitFailure.CLOSED and sentry.is_alive:
            sentry.alarmed.wait(NEWS_S)
        while not sentry.alarmed.is_set() and sentry.is_alive and time.monotonic() < until:
            sentry.do(lambda now: sentry.case.ask(cause, now))
            sentry.alarmed.wait(ANSWER_S)

    def _nobody_told(self, cause: WaitFailure) -> Lost:
        """What is left to say without a verdict: the rank that was waited for, or else this one, cut off or stuck."""
        here, rank = self._progress.look(), self._sentry.rank
        named = here.waits_for if here.waits_for >= 0 else rank
        hung = cause is WaitFailure.STUCK or (cause is WaitFailure.TIMED_OUT and named != rank)
        op = here.op if cause is WaitFailure.STUCK else UNKNOWN
        return Lost(rank, 0, named, LossKind.HUNG if hung else LossKind.CUT, op, here.step, time.time_ns(), 0)

    def _wait_until_met(self) -> None:
        until = time.monotonic() + MEET_S
        while not self._post.met.wait(0.05) and self.alarm is None and time.monotonic() < until:
            pass
        if self._post.met.is_set():
            return
        alarm, missing = self.alarm, self._post.missing()
        self.close()
        if alarm is not None:
            raise alarm
        raise TimeoutError(
            f"rank {self._sentry.rank} waited {MEET_S:g} s for ranks {', '.join(map(str, missing))} to connect; "
            "can they reach its address, or does it need address=?"
        )


class _Describe:
    """The error of this rank about a loss, with where it is now."""

    def __init__(self, rank: int, progress: ProgressPage, name: Naming, deadline_s: float) -> None:
        self._rank, self._progress, self._name, self._deadline_s = rank, progress, name, deadline_s

    def __call__(self, lost: Lost, waiting_for: str | None = None) -> RankLostError:
        return rank_lost(
            lost,
            rank=self._rank,
            here=self._progress.look(),
            name=self._name,
            deadline_s=self._deadline_s,
            waiting_for=waiting_for,
        )


def _onlooker(card: Contact, other: Contact) -> PageReader | None:
    return PageReader.open(other.pid, other.progress_fd, other.mark) if other.host == card.host else None


def _close(sentry: Watchdog, progress: ProgressPage) -> None:
    sentry.acknowledged = True
    sentry.leave()
    progress.close()


def _close_copies_in_children(post: Transport) -> None:
    known = weakref.ref(post)

    def forget() -> None:
        if (copy := known()) is not None:
            copy.forget()

    os.register_at_fork(after_in_child=forget)
