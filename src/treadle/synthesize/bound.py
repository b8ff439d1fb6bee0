"""What no order can beat: chains of needs, and for each rank the work that must fit between its heads and tails."""

from __future__ import annotations

import heapq
from itertools import pairwise

from treadle.ir import Kind
from treadle.synthesize.problem import StepProblem, TaskNeed


def lower_bound(problem: StepProblem, *, pairs: bool = False) -> int:
    """Return a makespan, in the problem's unit, that no order is shorter than; with `pairs`, none with pairs either."""
    heads, tails = longest_heads(problem), longest_tails(problem)
    chain = max(head + ticks + tail for head, ticks, tail in zip(heads, problem.shortest, tails, strict=True))
    return max(chain, *(_one_rank(problem, row, heads, tails, pairs) for row in problem.by_rank))


def longest_heads(problem: StepProblem) -> list[int]:
    """The longest chain of tasks and messages before each task."""
    heads = [0] * len(problem.tasks)
    edges = _edges(problem)
    for number in _in_order(problem):
        heads[number] = max(
            (heads[edge.task] + problem.shortest[edge.task] + edge.delay for edge in edges[number]), default=0
        )
    return heads


def longest_tails(problem: StepProblem) -> list[int]:
    """The longest chain of tasks and messages behind each task."""
    tails = [0] * len(problem.tasks)
    edges = _edges(problem)
    for number in reversed(_in_order(problem)):
        for edge in edges[number]:
            behind = edge.delay + problem.shortest[number] + tails[number]
            tails[edge.task] = max(tails[edge.task], behind)
    return tails


def _in_order(problem: StepProblem) -> list[int]:
    """All tasks, each behind what it waits for: a task waits for its own micro-batch, or for earlier ones."""
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


def _one_rank(problem: StepProblem, numbers: tuple[int, ...], heads: list[int], tails: list[int], pairs: bool) -> int:
    """The bound of one machine: at any time run the task with the longest tail, interrupting others for it."""
    waiting = sorted(numbers, key=lambda number: heads[number])
    left = {number: _least_ticks(problem, number, pairs) for number in numbers}
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


def _least_ticks(problem: StepProblem, number: int, pairs: bool) -> int:
    """The least time that a task adds to its rank's: none for a forward that a pair may hide."""
    return 0 if pairs and problem.tasks[number].action.kind is Kind.F else problem.shortest[number]
