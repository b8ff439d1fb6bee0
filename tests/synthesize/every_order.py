"""Every order of the cells of a tiny step, timed by a few lines of their own: what the solver is held to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import TypeAlias

from treadle.ir import Action, Kind, Placement

Ends: TypeAlias = dict[tuple[int, Kind, int], int]
"""(stage, F or B for the gradient, micro-batch) -> when it is there."""


@dataclass(frozen=True)
class Tiny:
    """A step: ticks of (kind, stage, mb), ticks of a message of each micro-batch, activations a rank may hold."""

    placement: Placement
    num_mb: int
    ticks: dict[tuple[Kind, int, int], int]
    send: tuple[int, ...]
    room: int | None
    backwards: tuple[tuple[Kind, ...], ...]
    """The ways to run a backward: (B,), (I, W), or both."""

    def makespan(self, rows: tuple[tuple[Action, ...], ...]) -> int | None:
        """The end of the step; None if it hangs."""
        placement = self.placement
        done: Ends = {}
        arrived: Ends = {}
        halves: dict[tuple[int, int], int] = {}
        channel: dict[tuple[int, int], int] = {}
        place, now = [0] * placement.pp, [0] * placement.pp
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row):
                    action = row[place[rank]]
                    stage = placement.stages[rank][action.chunk]
                    ready = self._ready(action, stage, rank, done, arrived, halves)
                    if ready is None:
                        break
                    now[rank] = max(now[rank], ready) + self.ticks[action.kind, stage, action.mb]
                    place[rank] += 1
                    moved = True
                    if action.kind is Kind.I:
                        halves[stage, action.mb] = now[rank]
                    if action.kind is Kind.W:
                        continue
                    letter = Kind.F if action.kind is Kind.F else Kind.B
                    done[stage, letter, action.mb] = now[rank]
                    target = stage + (1 if letter is Kind.F else -1)
                    if 0 <= target < placement.num_stages:
                        peer = placement.holder(target)[0]
                        if peer != rank:
                            sent = max(now[rank], channel.get((rank, peer), 0)) + self.send[action.mb]
                            channel[rank, peer] = arrived[stage, letter, action.mb] = sent
        return max(now) if all(place[rank] == len(row) for rank, row in enumerate(rows)) else None

    def _ready(
        self, action: Action, stage: int, rank: int, done: Ends, arrived: Ends, halves: dict[tuple[int, int], int]
    ) -> int | None:
        if action.kind is Kind.W:
            return halves.get((stage, action.mb))
        needs = []
        if action.kind is Kind.F:
            if stage > 0:
                needs.append((stage - 1, Kind.F, action.mb))
        else:
            needs.append((stage, Kind.F, action.mb))
            if stage < self.placement.num_stages - 1:
                needs.append((stage + 1, Kind.B, action.mb))
        times = []
        for need in needs:
            here = self.placement.holder(need[0])[0] == rank
            time = (done if here else arrived).get(need)
            if time is None:
                return None
            times.append(time)
        return max(times, default=0)

    def shortest(self) -> int:
        """The least makespan of all orders."""
        rows = [list(self._rows(rank)) for rank in range(self.placement.pp)]
        found = (self.makespan(each) for each in product(*rows))
        return min(time for time in found if time is not None)

    def _rows(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """Every order of a rank that keeps its own F, I, W in order and its room."""
        cells = [(mb, chunk) for mb in range(self.num_mb) for chunk in range(self.placement.vpp)]
        for ways in product(self.backwards, repeat=len(cells)):
            kinds = dict(zip(cells, ways, strict=True))
            tokens = [cell for cell in cells for _ in range(1 + len(kinds[cell]))]
            for order in set(permutations(tokens)):
                row, held, fits = [], 0, True
                seen = dict.fromkeys(cells, 0)
                for cell in order:
                    kind = (Kind.F, *kinds[cell])[seen[cell]]
                    seen[cell] += 1
                    held += kind is Kind.F
                    fits = fits and (self.room is None or held <= self.room)
                    held -= seen[cell] == 1 + len(kinds[cell])
                    row.append(Action(kind, *cell))
                if fits:
                    yield tuple(row)
