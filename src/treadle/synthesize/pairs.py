"""Overlapped pairs (F|B): no task is one, but schedules of ours have them, so the bound reckons with them.

The two actions of a pair start and end together. A pair may be faster than its actions apart, even than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from treadle.costs import Costs, durations
from treadle.ir import Action, Cell, Kind, Pair, Placement, Schedule
from treadle.ir.ops import LaneKind
from treadle.lowering import LoweringOptions, lower
from treadle.synthesize.problem import PairTimes, Place, StepProblem

ROUNDING = 3
"""Ticks of the clock by which a pair and its actions, each rounded, may differ though they take the same."""


class _ChunkPair(NamedTuple):
    """A forward of one chunk of a rank with a backward of one: their ticks in a pair and apart, factors of 1."""

    rank: int
    forward: int
    backward: int
    together: int
    apart: int

    @property
    def is_faster(self) -> bool:
        return self.together + ROUNDING < self.apart

    def least(self, apart: int) -> int:
        """The least ticks of a pair whose actions take `apart`; it grows with them, where micro-batches differ."""
        if apart == self.apart:
            return self.together
        return max(0, self.together * apart // max(1, self.apart) - ROUNDING)


def pair_times(
    placement: Placement, costs: Costs, options: LoweringOptions, wholes: dict[Place, int]
) -> PairTimes | None:
    """Return what pairs take at least, in ticks of the clock; None where none is faster than its actions apart.

    Args:
        placement: of stages on ranks.
        costs: durations.
        options: the model, at the grain of cells.
        wholes: ticks of forwards and whole backwards.

    """
    pairs = list(_chunk_pairs(placement, costs, options))
    if not any(pair.is_faster for pair in pairs):
        return None
    of_chunk: dict[tuple[int, Kind, int], list[Place]] = {}
    for place in wholes:
        of_chunk.setdefault((place[0], place[1].kind, place[1].chunk), []).append(place)
    inside: dict[Place, int] = {}
    added: dict[Place, int] = {}
    for pair in pairs:
        forwards, backwards = of_chunk[pair.rank, Kind.F, pair.forward], of_chunk[pair.rank, Kind.B, pair.backward]
        shortest, longest = (each(wholes[place] for place in backwards) for each in (min, max))
        for place in forwards:
            ticks = pair.least(wholes[place] + shortest)
            _keep_least(inside, place, ticks)
            _keep_least(added, place, max(0, ticks - longest))
        shortest = min(wholes[place] for place in forwards)
        for place in backwards:
            _keep_least(inside, place, pair.least(wholes[place] + shortest))
    return PairTimes(inside, added)


def _keep_least(least: dict[Place, int], place: Place, ticks: int) -> None:
    least[place] = min(ticks, least.get(place, ticks))


def most_rounded(problem: StepProblem) -> int:
    """The most ticks of the clock that rounded pairs may save a step whose bound leaves them out."""
    num_forwards = sum(task.action.kind is Kind.F for task in problem.tasks)
    return ROUNDING * num_forwards if problem.pairs is None else 0


def _chunk_pairs(placement: Placement, costs: Costs, options: LoweringOptions) -> Iterator[_ChunkPair]:
    """Read each pair of chunks off a Program that has it, and its actions."""
    alike = replace(costs, microbatch={})
    chunks = range(placement.vpp)
    row: list[Cell] = [Action(kind, 0, chunk) for chunk in chunks for kind in (Kind.F, Kind.B)]
    both = [(forward, backward) for forward in chunks for backward in chunks]
    pairs = [Pair(Action(Kind.F, 0, forward), Action(Kind.B, 1, backward)) for forward, backward in both]
    schedule = Schedule("pairs", placement, 2 * placement.num_pipes, ((*row, *pairs),) * placement.pp)
    program = lower(schedule, alike, options)
    ticks = durations(program, alike)
    for lane in (program.lane_kind == LaneKind.COMPUTE).nonzero()[0]:
        rank, first = int(program.lane_rank[lane]), int(program.lane_ptr[lane])
        for number, (forward, backward) in enumerate(both):
            together = int(ticks[first + len(row) + 2 * number])
            apart = int(ticks[first + 2 * forward] + ticks[first + 2 * backward + 1])
            yield _ChunkPair(rank, forward, backward, together, apart)
