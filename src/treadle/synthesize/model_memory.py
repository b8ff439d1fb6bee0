"""The limits in a CP-SAT model: what a rank holds from forwards to the ends of backwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from treadle.synthesize.problem import Budget, StageHold
from treadle.synthesize.task_model import TaskModel


class _Held(NamedTuple):
    """An amount that is held from the start of a forward to the end of another task."""

    forward: int
    release: int
    amount: int


def add_memory(model: TaskModel) -> None:
    """Keep every rank within every budget."""
    for budget in model.problem.budgets:
        for rank in range(model.problem.placement.pp):
            hold = model.problem.single_hold(budget, rank)
            if hold is not None:
                _keep_distance(model, hold)
            else:
                _keep_sum(model, _held(model, budget, rank), budget.limit, rank)


def _held(model: TaskModel, budget: Budget, rank: int) -> list[_Held]:
    problem = model.problem
    return [
        _Held(problem.forward_of(number), number, budget.given[number])
        for number in problem.by_rank[rank]
        if budget.given[number]
    ]


def _keep_distance(model: TaskModel, hold: StageHold) -> None:
    """A forward waits for the release of the micro-batch `room` before it."""
    for early, late in zip(hold.releases, hold.forwards[hold.room :], strict=False):
        if model.is_free(early) or model.is_free(late):
            model.cp.add(model.start[late] >= model.end[early])


def _keep_sum(model: TaskModel, held: list[_Held], limit: int, rank: int) -> None:
    """All that is held at once is within the limit. After the window the order is kept, and so is what it holds."""
    intervals: list[Any] = []
    amounts: list[int] = []
    after = model.first_after(rank)
    for each in held:
        if each.forward in model.followers or model.is_fixed(each.release):
            continue
        end = model.end[each.release] if each.release not in model.followers else after
        size = model.cp.new_int_var(0, model.most, "")
        intervals.append(model.cp.new_interval_var(model.start[each.forward], size, end, ""))
        amounts.append(each.amount)
    if intervals:
        model.cp.add_cumulative(intervals, amounts, limit)
