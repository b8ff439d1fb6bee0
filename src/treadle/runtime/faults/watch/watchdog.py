"""The watch's thread: it exchanges messages with neighbours, raises the alarm, and ends a process that does not react.

Only this thread touches the connections. The main thread queues errands for it and wakes it, and reads the alarm.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NoReturn

from treadle.runtime.faults.progress.progress_page import OUTSIDE, ProgressPage
from treadle.runtime.faults.watch.incident import Incident
from treadle.runtime.faults.watch.links import Neighbour, NeighbourLink
from treadle.runtime.faults.watch.loss import EXIT_LOST, Naming, RankLostError, rank_lost
from treadle.runtime.faults.watch.loss_messages import (
    Condition,
    Flooded,
    Goodbye,
    Greeting,
    Heartbeat,
    LossKind,
    Lost,
    Message,
    Observation,
    WaitState,
)
from treadle.runtime.faults.watch.transport import PARTING_S, Transport
from treadle.wire.listeners import Listener

BEAT_S = 0.2

AWAY_S = 1.0
"""A turn that comes later than this was held up on this host, so others' silence proves nothing."""

LEAST_SILENCE_S = 2.0
"""A rank that is silent for less is not lost, however short the deadline: its thread may have to wait for a core."""

OVERDUE_S = 0.75
"""How long after its deadline a wait that timed out may take to say so."""

GRACE_S = 3.0
"""How long a main thread in a step may go on after the alarm before its process is ended.

A turn counts at most twice its length: on a host that gives this process no core, the main thread had none either.
"""


class Watchdog:
    """One rank's watch thread. `groups` are the ranks of each group."""

    def __init__(
        self,
        rank: int,
        progress: ProgressPage,
        groups: Sequence[Sequence[int]],
        deadline_s: float,
        name: Naming,
    ) -> None:
        self.rank, self._progress, self.groups, self._name = rank, progress, groups, name
        self.deadline_s, self._silence_s = deadline_s, max(deadline_s, LEAST_SILENCE_S)
        self.incident = Incident(rank, self, self._spread)  # this thread's: others reach it by errands
        self.alarm: RankLostError | None = None
        self.alarmed = threading.Event()
        self.acknowledged = False
        self.failed: WaitState | None = None  # how the main thread's wait failed
        self._errands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unblocks: list[Callable[[], None]] = []
        self._last_turn = self._next_beat = self._still_since = time.monotonic()
        self._slots = progress.look()
        self._grace_s = GRACE_S
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="treadle-watch", daemon=True)

    # For the main thread.

    def start(
        self,
        neighbours: Sequence[Neighbour],
        listener: Listener[NeighbourLink],
        token: bytes,
        called: Mapping[int, NeighbourLink],
    ) -> Transport:
        """Starts the thread."""
        self._transport = Transport(self, neighbours, listener, token)
        self._transport.open(called)
        self._thread.start()
        return self._transport

    def do(self, errand: Callable[[], None]) -> threading.Event:
        """Queues an errand for the thread. The event is set once it is done."""
        done = threading.Event()

        def run() -> None:
            errand()
            done.set()

        self._errands.put(run)
        self._transport.wake()
        return done

    def on_alarm(self, unblock: Callable[[], None]) -> None:
        """Calls `unblock` on alarm; at once if there is one already."""
        self._unblocks.append(unblock)
        if self.alarm is not None:
            unblock()

    def describe(self, lost: Lost, waiting_for: str | None = None) -> RankLostError:
        """Returns this rank's error about a loss, which also says where this rank is."""
        here, name = self._progress.look(), self._name
        return rank_lost(
            lost, rank=self.rank, here=here, name=name, deadline_s=self.deadline_s, waiting_for=waiting_for
        )

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and does errands."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Sends a goodbye and ends the thread."""
        self._leaving = True
        self._transport.wake()
        if threading.current_thread() is not self._thread:  # where the watch is collected in its own thread
            self._thread.join(timeout=4 * PARTING_S)

    # For the incident.

    def own(self) -> Observation:
        """Returns the state of this rank."""
        op, waits_for, step = self._progress.look()
        waits: tuple[int, ...] = (waits_for,) if waits_for >= 0 else ()
        if 0 <= -2 - waits_for < len(self.groups):
            waits = tuple(rank for rank in self.groups[-2 - waits_for] if rank != self.rank)
        still_s = time.monotonic() - self._still_since
        wait = self.failed
        if wait is None:
            wait = WaitState.OVERDUE if still_s > self.deadline_s + OVERDUE_S else WaitState.RUNS
        return Observation(
            self.rank, Condition.ANSWERS, op, step, int(still_s * 1000), exact=True, waits=waits, wait=wait
        )

    def neighbours(self) -> Iterable[Observation]:
        """Returns the last known states of the neighbours."""
        return [neighbour.observe(time.monotonic()) for neighbour in self._transport.neighbours.values()]

    def _spread(self, message: Flooded) -> None:
        self._transport.spread(message)

    # For the transport.

    def hear(self, neighbour: Neighbour, message: Message) -> None:
        """Handles a message, and passes it on if it is for every rank."""
        now = time.monotonic()
        match message:
            case Heartbeat(slots):
                neighbour.hear(slots, now)
            case Goodbye(slots):
                neighbour.hear(slots, now)
                neighbour.left = True
            case Greeting():
                pass  # the transport has taken the first
            case _:
                neighbour.heard = now
                if self.incident.hear(message, now):
                    self._transport.spread(message, source=neighbour)
                if isinstance(message, Lost) and message.silent and message.rank == self.rank:
                    self._exit(self.describe(message))  # it was stopped, and given up since: it must write no more

    def miss(self, neighbour: Neighbour, *, died: bool) -> None:
        """Reports a neighbour that is gone without a goodbye, unless its loss is known or follows from a known one."""
        known = any(lost.rank == neighbour.rank for lost in self.incident.reports)
        if not known and self.incident.first_loss is None:
            now = time.monotonic()
            self.incident.lose(LossKind.KILLED if died else LossKind.CUT, neighbour.observe(now), now)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._turn()
            self._run_errands()
        except Exception:  # must be seen, and not be taken for the death of this rank
            sys.stderr.write(f"treadle: the watch of rank {self.rank} has ended:\n{traceback.format_exc()}")
        try:
            self._repeat_reports()
            self._transport.part(self._progress.look())
        finally:
            self._transport.close()

    def _turn(self) -> None:
        wait_s = min(self._next_beat, self.incident.due()) - time.monotonic()
        self._transport.turn(max(0.0, wait_s))
        now = time.monotonic()
        if now - self._last_turn > AWAY_S:
            for neighbour in self._transport.neighbours.values():
                neighbour.heard = now
        held_s = min(now - self._last_turn, 2 * BEAT_S)
        self._last_turn = now
        self._run_errands()
        if (slots := self._progress.look()) != self._slots:
            self._slots, self._still_since = slots, now
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._beat(now)
        self.incident.turn(now)
        if self.incident.first_loss is not None:
            if self.alarm is None:
                self._raise_alarm(self.incident.first_loss)
            self._insist(self.incident.first_loss, held_s)

    def _run_errands(self) -> None:
        with suppress(Empty):
            while True:
                self._errands.get_nowait()()

    def _beat(self, now: float) -> None:
        self._transport.spread(Heartbeat(self._slots))
        self._repeat_reports()
        for neighbour in self._transport.neighbours.values():
            is_silent = neighbour.link is not None and now - neighbour.heard > self._silence_s
            if is_silent and not self.incident.reports:
                self.incident.lose(LossKind.HUNG, neighbour.observe(now), now, silent=True)

    def _repeat_reports(self) -> None:
        """Sends known losses again, for neighbours that have connected since."""
        for lost in self.incident.reports:
            self._transport.spread(lost)

    def _raise_alarm(self, lost: Lost) -> None:
        """Tells the main thread, and kills a silent neighbour: a lost rank must not come back and write."""
        self.alarm = self.describe(lost)
        if lost.silent and lost.rank in self._transport.neighbours:
            page_reader = self._transport.neighbours[lost.rank].page_reader
            if page_reader is not None:
                page_reader.kill()
        self.alarmed.set()
        for unblock in list(self._unblocks):
            try:
                unblock()
            except Exception:  # the caller's code: the other callbacks must still run
                sys.stderr.write(f"treadle: rank {self.rank}: on alarm: {traceback.format_exc()}")

    def _insist(self, lost: Lost, held_s: float) -> None:
        """Ends this process if its main thread does not react in a step, or if this rank is the lost one."""
        if self.acknowledged or (self._slots.op == OUTSIDE and lost.rank != self.rank):
            self._grace_s = GRACE_S
            return
        self._grace_s -= held_s
        if self._grace_s <= 0:
            assert self.alarm is not None
            self._exit(self.alarm)

    def _exit(self, alarm: RankLostError) -> NoReturn:
        text = f"treadle: rank {self.rank} did not react and was ended (exit code {EXIT_LOST}). {alarm}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        os._exit(EXIT_LOST)
