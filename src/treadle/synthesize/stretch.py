"""A repeating steady pattern: a good order of few micro-batches, its middle repeated for many.

    few     F F F I F I W F I W F I W I W I W W
    block                 -----
    many    F F F I F I W F I W F I W F I W F I W F I W I W I W W

A block holds every task of a rank's stages equally often, so a rank holds as much after it as before. Micro-batches
are numbered anew in the order in which each stage takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from treadle.synthesize.evaluate import CellOrder, start_times
from treadle.synthesize.problem import StepProblem, TaskClass

_REPEATED = (1, 2, 3, 4)
"""Micro-batches of a block, besides as many as fit a rank: under a tight limit they pass in bursts of that size."""

_CUTS = tuple(place / 20 for place in range(6, 15))
"""Times, as shares of the step, at which a block ends."""


def few_microbatches(problem: StepProblem, most_tasks: int) -> int | None:
    """Return a number of micro-batches that fills the pipeline two or three times, as can be searched well.

    None where micro-batches cannot be repeated, or there are no more than that.
    """
    placement = problem.placement
    if not problem.alike or placement.num_pipes > 1 or any(t.whole_ticks is not None for t in problem.tasks):
        return None
    of_one = len(problem.tasks) // problem.num_microbatches
    few = max(2 * placement.pp, min(3 * placement.pp, most_tasks // of_one))
    few += (problem.num_microbatches - few) % _burst(problem)
    return few if few < problem.num_microbatches else None


def _burst(problem: StepProblem) -> int:
    """The micro-batches that fit a rank; 1 where that is no limit."""
    room = min((hold.room for hold in problem.single_holds), default=1)
    return room if room <= problem.placement.pp else 1


def stretched(problem: StepProblem, small: StepProblem, order: CellOrder) -> Iterator[CellOrder]:
    """Yield orders of all micro-batches, from one of few."""
    more = problem.num_microbatches - small.num_microbatches
    starts = start_times(small, order)
    end = max(starts.values())
    for repeated in sorted({*_REPEATED, _burst(problem)}):
        if more % repeated:
            continue
        for cut in _CUTS:
            rows = [_stretch_row(small, row, starts, cut * end, repeated, more // repeated) for row in order.rows]
            if all(row is not None for row in rows):
                yield CellOrder(tuple(_numbered(problem, row) for row in rows if row is not None))


def _stretch_row(
    small: StepProblem, row: tuple[int, ...], starts: dict[int, int], time: float, repeated: int, times: int
) -> list[TaskClass] | None:
    """Repeat the block that ends nearest to a time; None if the rank has no block."""
    classes = [small.tasks[number].of for number in row]
    length = repeated * len(set(classes))
    ends = sorted(range(length, len(row)), key=lambda place: abs(starts[row[place]] - time))
    for place in ends[: 2 * length]:
        block = classes[place - length : place]
        if set(Counter(block).values()) == {repeated}:
            return [*classes[:place], *(block * times), *classes[place:]]
    return None


def _numbered(problem: StepProblem, row: list[TaskClass]) -> tuple[int, ...]:
    """Give the n-th task of each class micro-batch n."""
    counts: Counter[TaskClass] = Counter()
    numbers = []
    for of in row:
        numbers.append(problem.by_class[of][counts[of]])
        counts[of] += 1
    return tuple(numbers)
