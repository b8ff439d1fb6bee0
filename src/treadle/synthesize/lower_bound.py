"""What no order can beat: chains of needs, and for each rank the work that must fit between its heads and tails."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from treadle.ir import Kind
from treadle.synthesize.problem import StepProblem, TaskNeed


def lower_bound(problem: StepProblem) -> int:
    """Return a makespan, in the problem's unit, that no order is shorter than; none with pairs either."""
    ticks = _least_ticks(problem)
    heads, tails = longest_heads(problem, ticks), longest_tails(problem, ticks)
    chain = max(head + least + tail for head, least, tail in zip(heads, ticks, tails, strict=True))
    left = _least_added(problem, ticks)
    return max(chain, *(_one_rank(row, left, heads, tails) for row in problem.by_rank))


def longest_heads(problem: StepProblem, ticks: Sequence[int]) -> list[int]:
    """The longest chain of tasks and messages before each task."""
    heads = [0] * len(problem.tasks)
    edges = _edges(problem)
    for number in _in_order(problem):
        heads[number] = max((heads[edge.task] + ticks[edge.task] + edge.delay for edge in edges[number]), default=0)
    return heads


def longest_tails(problem: StepProblem, ticks: Sequence[int]) -> list[int]:
    """The longest chain of tasks and messages after each task."""
    tails = [0] * len(problem.tasks)
    edges = _edges(problem)
    for number in reversed(_in_order(problem)):
        for edge in edges[number]:
            tails[edge.task] = max(tails[edge.task], edge.delay + ticks[number] + tails[number])
    return tails


def _least_ticks(problem: StepProblem) -> tuple[int, ...]:
    """The least time from a task's start to its end, in pairs or not. The backward of a pair is a whole one."""
    if problem.pairs is None:
        return problem.shortest
    inside: dict[int, int] = {}
    for number, task in enumerate(problem.tasks):
        if task.action.kind is not Kind.W:
            kind = Kind.F if task.action.kind is Kind.F else Kind.B
            ticks = problem.pairs.inside[task.rank, task.action._replace(kind=kind)]
            inside[number] = min(ticks, task.whole_ticks if task.whole_ticks is not None else ticks)
    return problem.shortest_with(inside)


def _least_added(problem: StepProblem, ticks: tuple[int, ...]) -> tuple[int, ...]:
    """The least time that a task adds to its rank's: of a forward in a pair, what its backward does not hide."""
    pairs = problem.pairs
    if pairs is None:
        return ticks
    return tuple(
        min(least, pairs.added[task.rank, task.action]) if task.action.kind is Kind.F else least
        for task, least in zip(problem.tasks, ticks, strict=True)
    )


def _in_order(problem: StepProblem) -> list[int]:
    """All tasks, each after what it waits for: a task waits for its own micro-batch, or for earlier ones."""
    return sorted(range(len(problem.tasks)), key=lambda n: (problem.tasks[n].action.mb, problem.depth[n]))


def _edges(problem: StepProblem) -> list[list[TaskNeed]]:
    """Needs; where micro-batches are alike also their order in a stage, and forwards that wait for room."""
    edges = [list(needed) for needed in problem.needs]
    for of, numbers in problem.by_class.items():
        if problem.is_ordered(of):
            for before, number in pairwise(numbers):
                edges[number].append(TaskNeed(before, 0))
    for held in problem.single_holds:
        for early, late in zip(held.releases, held.forwards[held.room :], strict=False):
            edges[late].append(TaskNeed(early, 0))
    return edges


def _one_rank(numbers: tuple[int, ...], ticks: Sequence[int], heads: list[int], tails: list[int]) -> int:
    """The bound of one machine: at any time run the task with the longest tail, interrupting others for it."""
    waiting = sorted(numbers, key=lambda number: heads[number])
    left = {number: ticks[number] for number in numbers}
    ready: list[tuple[int, int]] = []
    now = least = place = 0
    while place < len(waiting) or ready:
        if not ready:
            now = max(now, heads[waiting[place]])
        while place < len(waiting) and heads[waiting[place]] <= now:
            heapq.heappush(ready, (-tails[waiting[place]], waiting[place]))
            place += 1
        tail, number = ready[0]
        until = heads[waiting[place]] if place < len(waiting) else now + left[number]
        ran = min(left[number], until - now)
        now += ran
        left[number] -= ran
        if left[number] == 0:
            heapq.heappop(ready)
            least = max(least, now - tail)
    return least
