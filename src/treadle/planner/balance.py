"""Which blocks each stage gets, so that the slowest stage takes the least time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.costs import Costs
from treadle.ir.blocks import LAYERS

Number: TypeAlias = int | float | Fraction
"""A time or a factor; taken exactly as it is, floats too."""
Whole: TypeAlias = npt.NDArray[Any]
"""Whole numbers, of 64 bits or Python's."""


def balance(
    blocks: str,
    times: Sequence[Number],
    num_stages: int,
    *,
    factors: Sequence[Number] | None = None,
    layer_in_each: bool = True,
) -> tuple[range, ...]:
    """Cut a row of blocks into stages so that the slowest stage is the fastest possible.

    Of all such cuts it is one with the least sum of squares of the stages' times, so the other stages are even too.
    Both are exact: nothing is rounded, and all cuts are considered.

    Args:
        blocks: the letters of the whole model in order, as "Edddttt...mL".
        times: of each block, in any unit.
        num_stages: how many stages there are; each gets at least one block.
        factors: how much slower each stage computes than `times` say; 1 where absent.
        layer_in_each: each stage has a layer (t or d) too.

    Returns:
        For each stage the range of its blocks.

    Raises:
        ValueError: there are too few blocks or layers for the stages, or times and factors do not fit.

    Example:
        >>> balance("EttttL", [1, 4, 4, 4, 4, 6], 3)
        (range(0, 2), range(2, 4), range(4, 6))

    """
    _check_sizes(blocks, times, num_stages, factors)
    layers = sum(map(blocks.count, LAYERS))
    if layer_in_each and layers < num_stages:
        raise ValueError(
            f"{num_stages} stages with a layer each need as many layers, got {layers} in {blocks!r}; "
            "take fewer stages, or layer_in_each=False"
        )
    row = _Row(
        _whole(times, "time"),
        _whole([1] * num_stages if factors is None else factors, "factor"),
        [not layer_in_each or letter in LAYERS for letter in blocks],
    )
    slowest = _least_maximum(row)
    cuts = _least_squares(row, slowest)
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def balance_blocks(costs: Costs, blocks: str, num_stages: int, *, layer_in_each: bool = True) -> tuple[str, ...]:
    """Return the blocks of each stage so that the slowest stage is the fastest possible under these costs.

    A block takes its forward and its backward of one micro-batch. A stage with a `factor` takes so many times as long.

    Raises:
        ValueError: there are too few blocks or layers for the stages, or the costs do not say what a layer takes.

    Example:
        >>> balance_blocks(treadle.load_costs("unit"), "EttttttttL", 4)
        ('Ett', 'tt', 'tt', 'ttL')

    """
    times = {block: costs.of_block(block) for block in set(blocks)}
    cut = balance(
        blocks,
        [times[block] for block in blocks],
        num_stages,
        factors=costs.stage_factors("factor", num_stages) or None,
        layer_in_each=layer_in_each,
    )
    return tuple(blocks[stage.start : stage.stop] for stage in cut)


class _Row:
    """The blocks in whole numbers. A stage needs one of the blocks of which `needed` is True.

    `times[start, stop]` is what a stage of these blocks takes at a factor of 1, `none` where it cannot have them.
    Numbers that 64 bits may not hold are Python's.
    """

    def __init__(self, times: list[int], factors: list[int], needed: list[bool]) -> None:
        self.factors, self.num_blocks = factors, len(times)
        self.width = len(times) - len(factors) + 1
        """How many places a stage can start at, and end at: each before it and after it has a block."""
        self.none = 4 * (max(1, sum(times)) * max(1, *factors)) ** 2
        """More than any cut takes, and than its squares."""
        self.kind: type[np.generic] = np.int64 if self.none < 2**61 else np.object_
        before: Whole = np.array([*accumulate(times, initial=0)], self.kind)
        counts = np.array([*accumulate(map(int, needed), initial=0)])
        self._times = before[None, :] - before[:, None]
        self._may = counts[:, None] < counts[None, :]

    def of_stage(self, stage: int) -> Whole:
        """Return what a stage takes from each place where it can start to each where it can end."""
        starts, stops = slice(stage, stage + self.width), slice(stage + 1, stage + 1 + self.width)
        return np.where(self._may[starts, stops], self._times[starts, stops] * self.factors[stage], self.none)

    def first(self) -> Whole:
        """Return what is done before the first stage, for each place where it can start: nothing at the first one."""
        return np.array([0] + [self.none] * (self.width - 1), self.kind)


def _least_maximum(row: _Row) -> int:
    """Return the time of the slowest stage in the best cut: stage by stage, for each place where it can end."""
    done = row.first()
    for stage in range(len(row.factors)):
        done = np.maximum(done[:, None], row.of_stage(stage)).min(0)
    return int(done[-1])


def _least_squares(row: _Row, slowest: int) -> list[int]:
    """Return where stages start and end in the cut with the least sum of squares that has no stage over `slowest`."""
    done, starts = row.first(), []
    for stage in range(len(row.factors)):
        times = row.of_stage(stage)
        squares = np.where(times <= slowest, np.minimum(times, slowest) ** 2, row.none)
        sums = np.minimum(done[:, None] + squares, row.none)
        starts.append(stage + sums.argmin(0))
        done = sums.min(0)
    cuts = [row.num_blocks]
    for stage in range(len(starts) - 1, -1, -1):
        cuts.append(int(starts[stage][cuts[-1] - stage - 1]))
    return cuts[::-1]


def _check_sizes(blocks: str, times: Sequence[Number], num_stages: int, factors: Sequence[Number] | None) -> None:
    if len(times) != len(blocks):
        raise ValueError(f"each of the {len(blocks)} blocks has a time, got {len(times)} times")
    if not 1 <= num_stages <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks make 1 to {len(blocks)} stages, got {num_stages}")
    if factors is not None and len(factors) != num_stages:
        raise ValueError(f"each of the {num_stages} stages has a factor, got {len(factors)} factors")


def _whole(values: Sequence[Number], what: str) -> list[int]:
    """Return the values as multiples of one unit, exactly."""
    for place, value in enumerate(values):
        if not isfinite(value) or value < 0:
            raise ValueError(f"a {what} is a number from 0, got {value} as number {place}")
    fractions = [Fraction(value) for value in values]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]
