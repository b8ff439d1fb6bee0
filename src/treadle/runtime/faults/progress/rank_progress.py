"""What a rank is at, where several lanes are at once: shown to others as one op and whom that op waits for.

The thread that computes shows the op it computes. While it waits, it shows what holds it up: from the op it wants to
start, along what that needs and what is before it on its lane, to one that has started or could. That one waits for
other ranks while its lane's thread is in a wait, and else for nobody. Others follow who waits for whom from there, as
at the grain of cells.

    compute  attn 1.0 . . . . mlp 0.0           shown:  attn 1.0   dispatch 0.0   mlp 0.0
    ep       dispatch 0.0 . . .
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from treadle.dist.channel import Channel
from treadle.dist.device import Wait
from treadle.dist.groups import Group
from treadle.runtime.faults.progress.wait_target import NOBODY

OWN_LANE = 0
SUSPECT_S = 0.5
"""For how long an op that waits for nobody has to stay where it is, after a wait has failed, to be taken for hung."""

_NOTHING = -1


@dataclass(frozen=True)
class OpTable:
    """A rank's ops, by their place in the order of launches: numbers in the Program, lanes, needs, whom each waits for.

    `of_lane[lane]`: the places of a lane's ops, in order.
    """

    index: Sequence[int]
    lane: Sequence[int]
    after: Sequence[Sequence[int]]
    wait_target: Sequence[int]
    of_lane: Sequence[Sequence[int]]


class RankProgress:
    """One step: which ops have started and ended, and which wait. `slots` are what others see."""

    def __init__(self, rows: OpTable, slots: memoryview) -> None:
        self._rows, self._slots, size = rows, slots, len(rows.index)
        self._started, self._waits, self._ended = bytearray(size), bytearray(size), bytearray(size)
        self._turn = [0] * len(rows.of_lane)
        self._wanted = _NOTHING
        self._own_thread = threading.get_ident()
        self._at: dict[int, int] = {}
        self._lock = threading.Lock()

    def want(self, at: int) -> None:
        """The thread that computes has come to an op of its own, which may have to wait."""
        with self._lock:
            self._wanted = at
            self._show()

    def want_all(self) -> None:
        """It has come to the end of the step, and waits for the other lanes."""
        self.want(len(self._rows.index))

    def begin(self, at: int) -> None:
        """An op starts. What the thread that computes does itself is what this rank is at."""
        thread = threading.get_ident()
        with self._lock:
            self._started[at] = 1
            if thread == self._own_thread:
                self._wanted = _NOTHING
                self.show(at, self._rows.wait_target[at])
            else:
                self._at[thread] = at
                self._show()

    def end(self, at: int) -> None:
        """An op has ended."""
        with self._lock:
            self._ended[at] = 1
            self._turn[self._rows.lane[at]] += 1
            self._at.pop(threading.get_ident(), None)
            self._show()

    def fail(self) -> None:
        """The op of this thread has failed: it counts as where it was, and what needs it is not about to start."""
        with self._lock:
            self._at.pop(threading.get_ident(), None)

    def wait(self, begins: bool) -> None:
        """The op of this thread begins to wait for other ranks, or has waited."""
        at = self._at.get(threading.get_ident())
        if at is not None:
            with self._lock:
                self._waits[at] = begins
                self._show()

    def over(self) -> None:
        """The step has failed: what is shown stays, whatever other lanes still do."""
        with self._lock:
            self._wanted = _NOTHING

    def show(self, at: int, wait_target: int) -> None:
        """Lets others see that this rank is at an op, and whom it waits for there."""
        self._slots[0], self._slots[1] = self._rows.index[at], wait_target

    def suspect_itself(self) -> None:
        """After a wait has failed: shows an op of another lane that has started, waits for nobody, and does not end."""
        suspects = self._busy()
        if suspects:
            time.sleep(SUSPECT_S)
            hung = [at for at in self._busy() if at in suspects]
            if hung:
                self.show(hung[0], NOBODY)

    def _busy(self) -> list[int]:
        """Ops under way in other lanes that wait for nobody."""
        with self._lock:
            return [at for at in self._at.values() if not self._waits[at]]

    def _show(self) -> None:
        if self._wanted == _NOTHING:
            return
        at = self._wanted
        while (held_up_by := self._before(at)) is not None:
            at = held_up_by
        if at < len(self._rows.index):
            busy = self._started[at] and not self._waits[at]
            self.show(at, NOBODY if busy else self._rows.wait_target[at])

    def _before(self, at: int) -> int | None:
        """What an op that has not started waits for next, if anything."""
        rows = self._rows
        if at == len(rows.index):
            heads = (row[turn] for row, turn in zip(rows.of_lane, self._turn, strict=True) if turn < len(row))
            return next(heads, None)
        if self._started[at]:
            return None
        lane = rows.lane[at]
        head = rows.of_lane[lane][self._turn[lane]]
        if head != at:
            return head
        return next((other for other in rows.after[at] if not self._ended[other]), None)


class ObservedWait:
    """A communicator's wait, of which the step that is under way gets to know."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.step: RankProgress | None = None

    @classmethod
    def of(cls, talkers: Iterable[Group | Channel]) -> list[ObservedWait]:
        """Has the waits of some communicators noted."""
        noted = []
        for talker in talkers:
            if not isinstance(talker.wait, ObservedWait):
                talker.wait = ObservedWait(talker.wait)
            noted.append(talker.wait)
        return noted

    def __call__(self, work: dist.Work) -> Any:
        """Waits."""
        step = self.step
        if step is None:
            return self._wait(work)
        step.wait(True)
        waited = self._wait(work)
        step.wait(False)  # not where it failed: a rank that waited in vain is not busy
        return waited
