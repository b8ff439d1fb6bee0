"""The steps of a targeted plan: in one a device sends one bucket at most and receives one at most.

A bucket goes from its source to the first taker of its route, and from there to the next, one hop a step. A hop comes
in a later step than the hop before it, and fills an IPC buffer whose bucket was sent on in an earlier step. So devices
that take their steps in order never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.ir.program import NEVER, Bools, Ints

_STEPS = 1 << 32
"""More than there are steps, so that a device and a step are one number."""


@dataclass(frozen=True, eq=False)
class Hops:
    """Columns over hops, bucket by bucket along its route. A bucket that stays on its device has one, to itself.

    `into` is the receiver's IPC buffer, and `held` the sender's, NEVER on a source.
    """

    bucket: Ints
    sender: Ints
    receiver: Ints
    step: Ints
    into: Ints
    held: Ints

    @property
    def moves(self) -> Bools:
        """Hops over a link."""
        moved: Bools = self.sender != self.receiver
        return moved

    @property
    def num_steps(self) -> int:
        """Steps of the device that comes to an end last."""
        return int(self.step.max(initial=-1)) + 1


def matched_steps(routes: Sequence[tuple[int, ...]], num_ipc: int) -> Hops:
    """Give each hop the first step in which both devices, and a buffer at the receiver, are free.

    A route has the source and then the takers. What a source sends keeps its order. What stays comes before the moves
    of its step.
    """
    steps = _GivenSteps(num_ipc)
    found = [steps.of(route) for route in routes]
    lengths = np.array([len(route) - 1 for route in routes], np.int64)
    first = np.cumsum(lengths) - lengths
    sender, receiver = (
        np.array([rank for route in routes for rank in route[part]], np.int32) for part in (slice(-1), slice(1, None))
    )
    step = np.array([at for mine in found for at in mine], np.int32)
    into = _buffers(sender, receiver, step, first, num_ipc)
    held = np.r_[np.int32(NEVER), into[:-1]][: len(into)].astype(np.int32)
    held[first] = NEVER
    return Hops(np.repeat(np.arange(len(routes), dtype=np.int32), lengths), sender, receiver, step, into, held)


class _GivenSteps:
    """The steps in which devices send, receive and hold buckets, as far as they are given away."""

    def __init__(self, num_ipc: int) -> None:
        self._num_ipc = num_ipc
        self._sends, self._receives = set[int](), set[int]()
        self._holds: dict[int, int] = {}
        self._next: dict[int, int] = {}  # of a source: after its last bucket
        self._open: dict[int, int] = {}  # of a receiver: the first step in which it does not receive

    def of(self, route: tuple[int, ...]) -> list[int]:
        """Return the step of each hop of a route."""
        source = route[0]
        begin = self._next.get(source, 0)
        if route[1:] == (source,):
            return [begin]
        last = len(route) - 1
        least, steps = [begin] + [0] * (last - 1), [0] * last
        hop = 0
        while hop < last:
            before = steps[hop - 1] + 1 if hop else 0
            steps[hop] = step = self._free(route[hop], route[hop + 1], max(before, least[hop]))
            full = self._full(route[hop], before, step) if hop else None
            if full is not None:  # the sender cannot hold it that long: it comes there later
                hop -= 1
                least[hop] = full + 1
            else:
                hop += 1
        self._next[source] = steps[0] + 1
        for hop, step in enumerate(steps):
            self._take(route[hop], route[hop + 1], step, steps[hop + 1] if hop + 1 < last else step)
        return steps

    def _free(self, sender: int, receiver: int, step: int) -> int:
        sender, receiver = sender * _STEPS, receiver * _STEPS
        step = max(step, self._open.get(receiver, 0))
        while (
            sender + step in self._sends
            or receiver + step in self._receives
            or self._holds.get(receiver + step, 0) == self._num_ipc
        ):
            step += 1
        return step

    def _full(self, device: int, begin: int, end: int) -> int | None:
        """Return the last step from `begin` to `end` in which all buffers of a device are held."""
        for step in range(end, begin - 1, -1):
            if self._holds.get(device * _STEPS + step, 0) == self._num_ipc:
                return step
        return None

    def _take(self, sender: int, receiver: int, step: int, until: int) -> None:
        """A bucket moves in a step; the receiver holds it until it has sent it on."""
        self._sends.add(sender * _STEPS + step)
        receiver *= _STEPS
        self._receives.add(receiver + step)
        for held in range(receiver + step, receiver + until + 1):
            self._holds[held] = self._holds.get(held, 0) + 1
        begin = self._open.get(receiver, 0)
        while receiver + begin in self._receives:
            begin += 1
        self._open[receiver] = begin


def _buffers(sender: Ints, receiver: Ints, step: Ints, first: Ints, num_ipc: int) -> Ints:
    """The IPC buffer of each hop at its receiver: of those that are free the one that was used least recently."""
    last = (np.r_[first[1:], len(step)] - 1)[: len(first)]
    until = np.r_[step[1:], step[:1]]  # in this step the bucket is sent on
    until[last] = step[last]
    into = np.full(len(step), NEVER, np.int32)
    used: dict[int, list[int]] = {}
    for hop in np.lexsort((step, receiver)).tolist():
        if sender[hop] == receiver[hop]:
            continue
        mine = used.setdefault(int(receiver[hop]), [-1] * num_ipc)
        into[hop] = at = mine.index(min(mine))
        assert mine[at] < step[hop]
        mine[at] = int(until[hop])
    return into
