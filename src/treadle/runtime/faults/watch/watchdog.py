"""The thread that listens, tells, and ends what does not react.

It alone touches the connections. The main thread leaves it errands and wakes it; it leaves the main thread the alarm.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NoReturn

from treadle.runtime.faults.progress.page import OUTSIDE, ProgressPage
from treadle.runtime.faults.watch.incident import Incident
from treadle.runtime.faults.watch.links import Neighbour
from treadle.runtime.faults.watch.loss import EXIT_LOST, RankLostError
from treadle.runtime.faults.watch.messages import (
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

BEAT_S = 0.2

AWAY_S = 1.0
"""A turn that comes later than this was held up here, so the silence of others says nothing."""

LEAST_SILENCE_S = 2.0
"""A rank that is silent for less is not lost, however short the deadline: a thread may have to wait for its turn."""

OVERDUE_S = 0.75
"""How long after its deadline a wait that timed out may take to say so."""

GRACE_S = 3.0
"""How long a main thread in a step may go on after the alarm without taking notice."""


class Watchdog:
    """One rank's thread. `describe` makes the error of a verdict; `groups` are the ranks of each group."""

    def __init__(
        self,
        rank: int,
        progress: ProgressPage,
        groups: Sequence[Sequence[int]],
        deadline_s: float,
        describe: Callable[[Lost], RankLostError],
    ) -> None:
        self.rank, self._progress, self._groups, self._describe = rank, progress, groups, describe
        self.deadline_s, self._silence_s = deadline_s, max(deadline_s, LEAST_SILENCE_S)
        self.case = Incident(rank, self, self._spread)  # the thread's: others reach it by errands
        self.alarm: RankLostError | None = None
        self.alarmed = threading.Event()
        self.acknowledged = False
        self.failed: WaitState | None = None  # how the main thread's wait ended, once it has failed
        self._errands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unblocks: list[Callable[[], None]] = []
        self._last_turn = self._next_beat = self._still_since = time.monotonic()
        self._slots = progress.look()
        self._exit_at: float | None = None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="treadle-watch", daemon=True)

    # For the main thread.

    def start(
        self,
        neighbours: Sequence[Neighbour],
        door: socket.socket,
        token: bytes,
        called: Mapping[int, socket.socket],
    ) -> Transport:
        """Begins to watch."""
        self._post = Transport(self, neighbours, door, token)
        self._post.open(called)
        self._thread.start()
        return self._post

    def do(self, errand: Callable[[float], None]) -> threading.Event:
        """Has `errand(now)` done in the thread. The event is set once it is done."""
        done = threading.Event()

        def run() -> None:
            errand(time.monotonic())
            done.set()

        self._errands.put(run)
        self._post.wake()
        return done

    def on_alarm(self, unblock: Callable[[], None]) -> None:
        """Has `unblock` called on alarm, which may be now."""
        self._unblocks.append(unblock)
        if self.alarm is not None:
            unblock()

    @property
    def is_alive(self) -> bool:
        """Is there still someone to do errands."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Says goodbye and ends the thread."""
        self._leaving = True
        self._post.wake()
        if threading.current_thread() is not self._thread:  # where the watch is collected in its own thread
            self._thread.join(timeout=4 * PARTING_S)

    # For the case.

    def own(self) -> Observation:
        """What this rank is doing."""
        op, waits_for, step = self._progress.look()
        waits: tuple[int, ...] = (waits_for,) if waits_for >= 0 else ()
        if 0 <= -2 - waits_for < len(self._groups):
            waits = tuple(rank for rank in self._groups[-2 - waits_for] if rank != self.rank)
        still_s = time.monotonic() - self._still_since
        wait = self.failed
        if wait is None:
            wait = WaitState.OVERDUE if still_s > self.deadline_s + OVERDUE_S else WaitState.RUNS
        return Observation(
            self.rank, Condition.ANSWERS, op, step, int(still_s * 1000), exact=True, waits=waits, wait=wait
        )

    def neighbours(self) -> Iterable[Observation]:
        """What its neighbours were last seen doing."""
        return [neighbour.sight(time.monotonic()) for neighbour in self._post.neighbours.values()]

    def _spread(self, message: Flooded) -> None:
        self._post.spread(message)

    # For the post.

    def hear(self, neighbour: Neighbour, message: Message) -> None:
        """Takes note, and passes on what is for everyone."""
        now = time.monotonic()
        match message:
            case Heartbeat(slots):
                neighbour.hear(slots, now)
            case Goodbye(slots):
                neighbour.hear(slots, now)
                neighbour.left = True
            case Greeting():
                pass  # said once already
            case _:
                neighbour.heard = now
                if self.case.hear(message, now):
                    self._post.spread(message, source=neighbour)
                if isinstance(message, Lost) and message.silent and message.rank == self.rank:
                    self._exit(self._describe(message))  # back from a stop, and given up since: no time to write

    def miss(self, neighbour: Neighbour, *, died: bool) -> None:
        """A neighbour is gone without goodbye: news, unless it is known or follows from what is known."""
        known = any(lost.rank == neighbour.rank for lost in self.case.reports)
        if not known and self.case.verdict is None:
            now = time.monotonic()
            self.case.lose(LossKind.KILLED if died else LossKind.CUT, neighbour.sight(now), now)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._turn()
            self._run_errands()
        except Exception:  # a watch that fails must not fail unseen, nor be taken for the death of its rank
            sys.stderr.write(f"treadle: the watch of rank {self.rank} has ended:\n{traceback.format_exc()}")
        try:
            self._post.part(self._progress.look())
        finally:
            self._post.close()

    def _turn(self) -> None:
        wait_s = min(self._next_beat, self.case.due()) - time.monotonic()
        self._post.turn(max(0.0, wait_s))
        now = time.monotonic()
        if now - self._last_turn > AWAY_S:
            for neighbour in self._post.neighbours.values():
                neighbour.heard = now
        self._last_turn = now
        self._run_errands()
        if (slots := self._progress.look()) != self._slots:
            self._slots, self._still_since = slots, now
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._beat(now)
        self.case.turn(now)
        if self.case.verdict is not None:
            if self.alarm is None:
                self._raise_alarm(self.case.verdict)
            self._insist(self.case.verdict, now)

    def _run_errands(self) -> None:
        with suppress(Empty):
            while True:
                self._errands.get_nowait()()

    def _beat(self, now: float) -> None:
        self._post.spread(Heartbeat(self._slots))
        for neighbour in self._post.neighbours.values():
            is_silent = neighbour.link is not None and now - neighbour.heard > self._silence_s
            if is_silent and not self.case.reports:
                self.case.lose(LossKind.HUNG, neighbour.sight(now), now, silent=True)

    def _raise_alarm(self, lost: Lost) -> None:
        """Tells the main thread, and kills a neighbour that cannot: a lost rank must not come back and write."""
        self.alarm = self._describe(lost)
        if lost.silent and lost.rank in self._post.neighbours:
            onlooker = self._post.neighbours[lost.rank].onlooker
            if onlooker is not None:
                onlooker.kill()
        self.alarmed.set()
        for unblock in list(self._unblocks):
            try:
                unblock()
            except Exception:  # another's code: the other ways out must still be tried
                sys.stderr.write(f"treadle: rank {self.rank}: on alarm: {traceback.format_exc()}")

    def _insist(self, lost: Lost, now: float) -> None:
        """Ends a process whose main thread does not react. Between steps it is left alone, unless it is the lost."""
        if self.acknowledged or (self._slots.op == OUTSIDE and lost.rank != self.rank):
            self._exit_at = None
        elif self._exit_at is None:
            self._exit_at = now + GRACE_S
        elif now >= self._exit_at:
            assert self.alarm is not None
            self._exit(self.alarm)

    def _exit(self, alarm: RankLostError) -> NoReturn:
        text = f"treadle: rank {self.rank} did not react and was ended (exit code {EXIT_LOST}). {alarm}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        os._exit(EXIT_LOST)
