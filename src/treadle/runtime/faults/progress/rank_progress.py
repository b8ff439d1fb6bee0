"""The progress of a rank that runs several lanes at once, shown to others as one op and its wait target.

While the compute thread computes, it shows the op it computes. While it waits, it shows the op that holds it up: from
the op it wants to start, along dependencies and earlier ops of lanes, to one that has started or could start. That op
waits for other ranks while its lane's thread is in a wait, and else for none. Other ranks follow wait targets from
there, as at the grain of cells.

    compute  attn 1.0 . . . . mlp 0.0           shown:  attn 1.0   dispatch 0.0   mlp 0.0
    ep       dispatch 0.0 . . .
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from treadle.dist.channel import Channel
from treadle.dist.device import Wait
from treadle.dist.groups import Group
from treadle.runtime.faults.progress.wait_target import NOBODY

OWN_LANE = 0
SUSPECT_S = 0.5
"""After a failed wait: how long an op without a wait target must not end to be taken for hung."""

_NOTHING = -1


@dataclass(frozen=True)
class OpTable:
    """A rank's ops in launch order: numbers in the Program, lanes, dependencies and wait targets.

    `of_lane[lane]` are the positions in launch order of a lane's ops.
    """

    index: Sequence[int]
    lane: Sequence[int]
    after: Sequence[Sequence[int]]
    wait_target: Sequence[int]
    of_lane: Sequence[Sequence[int]]


class RankProgress:
    """The progress of one step: ops that have started, wait and have ended. Other ranks see `slots`."""

    def __init__(self, rows: OpTable, slots: memoryview) -> None:
        self._rows, self._slots, size = rows, slots, len(rows.index)
        self._started, self._waits, self._ended = bytearray(size), bytearray(size), bytearray(size)
        self._turn = [0] * len(rows.of_lane)
        self._wanted = _NOTHING
        self._own_thread = threading.get_ident()
        self._at: dict[int, int] = {}
        self._lock = threading.Lock()

    def want(self, at: int) -> None:
        """The compute thread has reached op `at`, which may have to wait."""
        with self._lock:
            self._wanted = at
            self._show()

    def want_all(self) -> None:
        """The compute thread has reached the end of the step, and waits for the other lanes."""
        self.want(len(self._rows.index))

    def begin(self, at: int) -> None:
        """An op starts. An op of the compute thread is shown as this rank's op."""
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
        """The op of this thread has failed. It stays started and not ended, so ops that need it cannot start."""
        with self._lock:
            self._at.pop(threading.get_ident(), None)

    def wait(self, begins: bool) -> None:
        """The op of this thread begins (or ends) a wait for other ranks."""
        at = self._at.get(threading.get_ident())
        if at is not None:
            with self._lock:
                self._waits[at] = begins
                self._show()

    def over(self) -> None:
        """The step has failed. The shown op stays, whatever other lanes still do."""
        with self._lock:
            self._wanted = _NOTHING

    def show(self, at: int, wait_target: int) -> None:
        """Shows an op and its wait target to other ranks."""
        self._slots[0], self._slots[1] = self._rows.index[at], wait_target

    def suspect_itself(self) -> None:
        """After a failed wait: shows an op of another lane that runs without a wait target and does not end."""
        suspects = self._busy()
        if suspects:
            time.sleep(SUSPECT_S)
            hung = [at for at in self._busy() if at in suspects]
            if hung:
                self.show(hung[0], NOBODY)

    def _busy(self) -> list[int]:
        """Returns the running ops of other lanes that are in no wait."""
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
        """Returns the next op that an op which has not started waits for, or None."""
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


class StepWaits(Protocol):
    """The progress of a step that takes where an op waits."""

    def wait(self, begins: bool) -> None:
        """The op of this thread begins (or ends) a wait for other ranks."""
        ...


class ObservedWait:
    """A communicator's wait that notes its begin and end in the progress of the current step."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.step: StepWaits | None = None

    @classmethod
    def of(cls, waiting: Iterable[Group | Channel]) -> list[ObservedWait]:
        """Replaces the waits of groups and channels by observed ones, and returns these."""
        noted = []
        for each in waiting:
            if not isinstance(each.wait, ObservedWait):
                each.wait = ObservedWait(each.wait)
            noted.append(each.wait)
            if isinstance(each, Channel) and each.control_wait is not None:
                if not isinstance(each.control_wait, ObservedWait):
                    each.control_wait = ObservedWait(each.control_wait)
                noted.append(each.control_wait)
        return noted

    def __call__(self, work: dist.Work) -> Any:
        """Waits for the work, and notes the wait."""
        step = self.step
        if step is None:
            return self._wait(work)
        step.wait(True)
        waited = self._wait(work)
        step.wait(False)  # not after a failure: a rank that waited in vain is not busy
        return waited
