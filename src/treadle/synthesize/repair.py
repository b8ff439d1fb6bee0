"""Large-neighbourhood repair: free a window of an order, let CP-SAT find a better one for it, and go on from there.

A window is a span of time on all ranks, or on two neighbours only. Tasks before it keep their times. Tasks after it,
and those of other ranks, keep their order. Windows grow while they are solved in time and shrink while they are not.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from treadle.synthesize.cell_model import CellModel
from treadle.synthesize.evaluate import CellOrder, as_schedule, start_times, weigh
from treadle.synthesize.problem import StepProblem
from treadle.synthesize.solver import SolverRuns
from treadle.synthesize.task_model import Window

_FREE = (40, 80, 400)
"""The fewest free tasks of a window, as many as the first one has, the most."""

_WINDOW_S = 1.0
"""Seconds for one window."""

_WEIGHT = 1000
"""How much more the end of the step counts than the time at which a rank has done its window."""


@dataclass
class _Size:
    """The number of free tasks."""

    free: float = _FREE[1]

    def adapt(self, *, in_time: bool) -> None:
        """Grow after a window that was solved in time, shrink after one that was not."""
        self.free = min(_FREE[2], self.free * 1.1) if in_time else max(_FREE[0], self.free * 0.8)


def repair(
    problem: StepProblem,
    order: CellOrder,
    makespan: int,
    search: SolverRuns,
    *,
    bound: int,
    until_s: float,
    report: Callable[[int], None],
) -> CellOrder:
    """Improve an order window by window until `until_s` seconds of the search have passed, or the bound is reached.

    Args:
        problem: what is ordered.
        order: to start from.
        makespan: of that order, in ticks.
        search: the solver and its clock.
        bound: a makespan that cannot be beaten, in the problem's unit.
        until_s: seconds since the search began.
        report: is called with each better makespan, in ticks.

    """
    draw, size = random.Random(search.options.seed), _Size()
    while min(until_s - search.elapsed_s, search.left_s) > 0 and makespan > bound * problem.scale:
        changed, in_time = _solve_window(problem, order, makespan, search, bound, until_s, draw, round(size.free))
        size.adapt(in_time=in_time)
        weighed = weigh(problem, as_schedule(problem, changed)) if changed is not None else None
        if changed is not None and weighed is not None and weighed.makespan <= makespan:
            if weighed.makespan < makespan:
                report(weighed.makespan)
            order, makespan = changed, weighed.makespan
    return order


def _solve_window(
    problem: StepProblem,
    order: CellOrder,
    makespan: int,
    search: SolverRuns,
    bound: int,
    until_s: float,
    draw: random.Random,
    free: int,
) -> tuple[CellOrder | None, bool]:
    """Return a better order of a window, if one is found, and whether the solver was done in time."""
    starts = start_times(problem, order)
    window = _draw_window(problem, order, starts, draw, free)
    most = makespan // problem.scale
    model = CellModel(problem, most=most, least=bound, window=window)
    model.hint(starts, order.wholes, most)
    firsts = [first for rank in range(problem.placement.pp) if (first := model.first_after(rank)) is not None]
    model.cp.minimize(_WEIGHT * model.makespan + sum(firsts))
    found, _ = search.solve(model.cp, seconds=min(_WINDOW_S, until_s - search.elapsed_s))
    if found is None:
        return None, False
    return model.order(found), found.status == "OPTIMAL"


def _draw_window(
    problem: StepProblem, order: CellOrder, starts: dict[int, int], draw: random.Random, free: int
) -> Window:
    """Draw the ranks, then the first of the free tasks by time; the window may reach over both ends of the step."""
    pp = problem.placement.pp
    ranks = range(pp)
    if pp > 2 and draw.random() < 0.3:
        first = draw.randrange(pp - 1)
        ranks = range(first, first + 2)
    times = sorted(starts[number] for rank in ranks for number in order.rows[rank])
    place = _draw_place(len(times), free, len(times) * pp // problem.num_microbatches, draw)
    begin = times[max(0, place)]
    last = place + free
    end = times[last] if last < len(times) else times[-1] + 1
    end = max(end, begin + 1)
    if begin == times[0]:
        begin = 0
    fixed = {number: time for number, time in starts.items() if time < begin}
    after = tuple(row[_first(row, starts, end if rank in ranks else begin) :] for rank, row in enumerate(order.rows))
    return Window(order, fixed, after)


def _draw_place(num_tasks: int, free: int, filling: int, draw: random.Random) -> int:
    """Draw the place of a window's first task; half of the windows are where the pipeline fills or drains."""
    first, last = -free // 2, max(1, num_tasks - free // 2)
    side = draw.choice(("fill", "drain", "any", "any"))
    if side == "fill":
        last = min(last, filling)
    elif side == "drain":
        first = max(first, last - filling)
    return draw.randrange(first, last)


def _first(row: tuple[int, ...], starts: dict[int, int], time: int) -> int:
    """The place of the first task of a row that starts at `time` or later."""
    return bisect_left(row, time, key=starts.__getitem__)
