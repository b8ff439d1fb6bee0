"""Every order of the cells of a tiny step, timed by a few lines of their own: what the solver is held to.

What has run is a state. All orders that lead to a state go on in the same ways, so of their times only those are kept
that no other undercuts in everything: when ranks are free, when channels are, when messages arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from treadle.ir import Kind, Placement

State: TypeAlias = tuple[int, ...]
"""Of each cell: 0, then 1 behind its forward, 2 behind its input half, 3 behind all."""

Times: TypeAlias = tuple[int, ...]
"""Ranks, then channels, then what arrives for forwards, then for backwards; 0 of what is not on its way."""

_STEPS = {Kind.F: (0, 1), Kind.I: (1, 2), Kind.W: (2, 3), Kind.B: (1, 3)}
"""The state of a cell before and behind an action."""


class TinyCell(NamedTuple):
    """A micro-batch in a chunk."""

    rank: int
    chunk: int
    mb: int
    pipe: int
    stage: int


@dataclass(frozen=True)
class Room:
    """What cells hold from the start of their forwards to the end of their backwards, and how much fits a rank."""

    limit: int
    size: dict[TinyCell, int]


@dataclass(frozen=True)
class TinyStep:
    """Ticks of actions, of pairs of (forward, backward) that are faster than apart, and of a cell's messages."""

    placement: Placement
    cells: tuple[TinyCell, ...]
    ticks: dict[tuple[Kind, TinyCell], int]
    pairs: dict[tuple[TinyCell, TinyCell], int]
    send: dict[TinyCell, int]
    rooms: tuple[Room, ...]
    whole: bool

    def shortest(self, at_most: int) -> int | None:
        """The least makespan of all orders; None if none is as short as `at_most`."""
        return _Orders(self, at_most).shortest()


class _Orders:
    def __init__(self, step: TinyStep, at_most: int) -> None:
        self.step, self.at_most = step, at_most
        self.number = {(cell.pipe, cell.stage, cell.mb): n for n, cell in enumerate(step.cells)}
        pp = self.pp = step.placement.pp
        self.channel = {(src, dst): pp + src * pp + dst for src in range(pp) for dst in range(pp)}
        self.arrivals = {Kind.F: pp + pp * pp, Kind.B: pp + pp * pp + len(step.cells)}
        self.kinds = (Kind.F, Kind.B) if step.whole else (Kind.F, Kind.I, Kind.W, Kind.B)

    def shortest(self) -> int | None:
        size = len(self.step.cells)
        layers: list[dict[State, list[Times]]] = [{} for _ in range(3 * size + 1)]
        layers[0][(0,) * size] = [(0,) * (self.arrivals[Kind.B] + size)]
        for layer in layers[:-1]:
            for state, fronts in layer.items():
                for actions, behind in self._next(state):
                    found = layers[sum(behind)].setdefault(behind, [])
                    for times in fronts:
                        _keep(found, self._run(times, actions))
            layer.clear()
        ends = [max(times[: self.pp]) for fronts in layers[-1].values() for times in fronts]
        return min((end for end in ends if end <= self.at_most), default=None)

    def _next(self, state: State) -> Iterator[tuple[tuple[tuple[Kind, int], ...], State]]:
        """What may run next: an action, or a pair."""
        ready = [(kind, n) for n in range(len(state)) for kind in self.kinds if self._is_ready(state, kind, n)]
        for kind, n in ready:
            yield ((kind, n),), _behind(state, (kind, n))
        for forward in (n for kind, n in ready if kind is Kind.F):
            for backward in (n for kind, n in ready if kind is Kind.B):
                if (self.step.cells[forward], self.step.cells[backward]) in self.step.pairs:
                    both = (Kind.F, forward), (Kind.B, backward)
                    yield both, _behind(state, *both)

    def _is_ready(self, state: State, kind: Kind, n: int) -> bool:
        if state[n] != _STEPS[kind][0]:
            return False
        if kind is Kind.W:
            return True
        before = self._neighbour(n, -1 if kind is Kind.F else 1)
        if before is not None and state[before] < (1 if kind is Kind.F else 2):
            return False
        return kind is not Kind.F or self._fits(state, n)

    def _neighbour(self, n: int, step: int) -> int | None:
        cell = self.step.cells[n]
        return self.number.get((cell.pipe, cell.stage + step, cell.mb))

    def _fits(self, state: State, n: int) -> bool:
        rank = self.step.cells[n].rank
        for room in self.step.rooms:
            here = (cell for done, cell in zip(state, self.step.cells, strict=True) if done in (1, 2))
            held = sum(room.size[cell] for cell in here if cell.rank == rank)
            if held + room.size[self.step.cells[n]] > room.limit:
                return False
        return True

    def _run(self, times: Times, actions: tuple[tuple[Kind, int], ...]) -> Times | None:
        """The times behind an action or a pair; None where they are too long."""
        step, now = self.step, list(times)
        cells = [step.cells[n] for _, n in actions]
        rank = cells[0].rank
        for kind, n in actions:
            if kind is not Kind.W:
                slot = self.arrivals[Kind.F if kind is Kind.F else Kind.B] + n
                now[rank], now[slot] = max(now[rank], now[slot]), 0
        now[rank] += step.ticks[actions[0][0], cells[0]] if len(actions) == 1 else step.pairs[cells[0], cells[1]]
        if now[rank] > self.at_most:
            return None
        for kind, n in actions:
            if kind is not Kind.W:
                self._send(now, kind, n)
        for (src, _), slot in self.channel.items():
            now[slot] = max(now[slot], now[src])
        return tuple(now)

    def _send(self, now: list[int], kind: Kind, n: int) -> None:
        reader = self._neighbour(n, 1 if kind is Kind.F else -1)
        if reader is None:
            return
        src, dst = self.step.cells[n].rank, self.step.cells[reader].rank
        if src != dst:
            channel = self.channel[src, dst]
            now[channel] = max(now[channel], now[src]) + self.step.send[self.step.cells[n]]
            now[self.arrivals[Kind.F if kind is Kind.F else Kind.B] + reader] = now[channel]


def _behind(state: State, *actions: tuple[Kind, int]) -> State:
    after = list(state)
    for kind, n in actions:
        after[n] = _STEPS[kind][1]
    return tuple(after)


def _keep(found: list[Times], times: Times | None) -> None:
    """Keep times that no others undercut, and none that they undercut."""
    if times is None or any(all(map(int.__le__, other, times)) for other in found):
        return
    found[:] = [other for other in found if not all(map(int.__le__, times, other))]
    found.append(times)
