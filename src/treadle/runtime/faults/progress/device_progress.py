"""The progress of a rank whose ops run on streams of a device, from the events that its streams have reached.

The host launches ahead, so the op launched last says nothing. Each stream records an event where an op starts, where it
begins and ends a wait for other ranks, and where it ends. The last event that a stream has reached is its state:

    compute  |attn 1.0        |mlp 0.0 . . .             shown:  mlp 0.0, which computes
    ep       |dispatch 0.0 |waits . . . .                dispatch 0.0 only if no stream computes
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from treadle.dist.device import StreamDevice
from treadle.dist.streams import DeviceEvent
from treadle.runtime.faults.progress.rank_progress import OWN_LANE, OpTable
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY


class StreamState(Enum):
    """The state of a stream after an event."""

    COMPUTES = 1
    WAITS = 2
    ENDED = 3


class StreamMark(NamedTuple):
    """An event on a stream, the op that it belongs to, and the state of the stream after it."""

    event: DeviceEvent
    at: int
    state: StreamState


class DeviceProgress:
    """The progress of one step, each lane on a stream or all on the first. `look` shows it to other ranks in `slots`.

    `targets` are the ranks that each op waits for where it waits.
    """

    def __init__(self, rows: OpTable, targets: Sequence[int], slots: memoryview, device: StreamDevice) -> None:
        self._rows, self._targets, self._slots, self._device = rows, targets, slots, device
        self._marks: list[list[StreamMark]] = [[] for _ in rows.of_lane]
        self._reached: list[StreamMark | None] = [None] * len(rows.of_lane)
        self._ended = bytearray(len(rows.index))
        self._launching = 0, 0

    def begin(self, stream: int, at: int, event: DeviceEvent | None = None) -> None:
        """An op is launched on a stream, which is the current one. `event` is where it starts, if it is recorded."""
        self._launching = stream, at
        self._mark(StreamState.COMPUTES, event)

    def end(self, stream: int, at: int, event: DeviceEvent | None = None) -> None:
        """An op was launched. `event` is where it ends, if it is recorded."""
        self._launching = stream, at
        self._mark(StreamState.ENDED, event)

    def wait(self, begins: bool) -> None:
        """The op that is launched begins (or ends) a wait for other ranks."""
        self._mark(StreamState.WAITS if begins else StreamState.COMPUTES)

    def _mark(self, state: StreamState, event: DeviceEvent | None = None) -> None:
        stream, at = self._launching
        self._marks[stream].append(StreamMark(event if event is not None else self._device.now(), at, state))

    def look(self) -> None:
        """Show the op that holds up this rank, and the ranks it waits for; nothing new if no op has started."""
        for stream, marks in enumerate(self._marks):
            self._advance(stream, marks)
        found = self._holder()
        if found is not None:
            target = NOBODY
            if found.state is StreamState.WAITS:
                target = self._targets[found.at] if self._targets[found.at] != NOBODY else ALL
            self._slots[0], self._slots[1] = self._rows.index[found.at], target

    def _advance(self, stream: int, marks: list[StreamMark]) -> None:
        num = 0
        while num < len(marks) and marks[num].event.query():
            self._ended[marks[num].at] = marks[num].state is StreamState.ENDED
            num += 1
        if num:
            self._reached[stream] = marks[num - 1]
            del marks[:num]

    def _holder(self) -> StreamMark | None:
        """Return the state of the stream that holds up the others: one that computes before those that wait."""
        current = [mark for mark in self._reached if mark is not None and mark.state is not StreamState.ENDED]
        computing = [mark for mark in current if mark.state is StreamState.COMPUTES]
        if len(current) <= 1 or computing:
            return min(computing or current, key=lambda mark: mark.at, default=None)
        waiting = {mark.at: mark for mark in current}
        return waiting.get(self._before_compute(waiting), min(current, key=lambda mark: mark.at))

    def _before_compute(self, waiting: dict[int, StreamMark]) -> int:
        """Return the op in a wait for which the next op that computes waits in the end, -1 for none."""
        rows = self._rows
        to_see = [at for at in rows.of_lane[OWN_LANE] if not self._ended[at]][:1]
        seen = set(to_see)
        while to_see:
            at = to_see.pop()
            if at in waiting:
                return at
            before = [other for other in rows.of_lane[rows.lane[at]] if other < at]
            needed = [other for other in (*rows.after[at], *before) if not self._ended[other] and other not in seen]
            seen.update(needed)
            to_see += needed
        return -1
