"""An order of tasks as a schedule, and a schedule as an order: times by the simulator, limits by the verifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.costs import durations
from treadle.ir import Action, Cell, Kind, Pair, Schedule
from treadle.ir.ops import LaneKind
from treadle.lowering import lower
from treadle.simulator import simulate
from treadle.synthesize.problem import StepProblem
from treadle.verifier import verify_program, verify_schedule

NAME = "synthesized"


@dataclass(frozen=True)
class CellOrder:
    """The tasks of each rank in order. `wholes` are dgrads that run as whole backwards, without wgrads."""

    rows: tuple[tuple[int, ...], ...]
    wholes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Weighed:
    """A sound schedule that keeps the limits, with its simulated makespan in ticks of the costs' clock."""

    name: str
    schedule: Schedule
    makespan: int


def weigh(problem: StepProblem, schedule: Schedule, name: str | None = None) -> Weighed | None:
    """Simulate a schedule; None if it is not sound or does not keep the limits."""
    limits = problem.limits
    if not verify_schedule(schedule, max_activations=limits.max_activations).clean:
        return None
    program = lower(schedule, problem.costs, problem.options)
    if limits.memory_limit is not None:
        ticks = durations(program, problem.costs)
        if not verify_program(program, ticks, memory_limit=limits.memory_limit).clean:
            return None
    return Weighed(name or schedule.name, schedule, simulate(program, problem.costs).makespan)


def as_order(problem: StepProblem, schedule: Schedule) -> CellOrder | None:
    """Return the tasks of a schedule in its order; None if it splits backwards and the problem keeps them whole.

    Pairs are taken apart. Backwards are split where the problem has wgrads, unless a whole one is faster. Where
    micro-batches are alike they are numbered anew, so that each stage takes them in order.
    """
    rows, wholes = [], set()
    for rank in range(schedule.pp):
        row: list[int] = []
        counts: dict[tuple[Kind, int], int] = {}
        for action in schedule.actions(rank):
            for part in _parts(problem, rank, action):
                if problem.alike:
                    nth = counts.get((part.kind, part.chunk), 0)
                    counts[part.kind, part.chunk] = nth + 1
                    part = part._replace(mb=nth)
                number = problem.place_of.get((rank, part))
                if number is None:
                    return None
                row.append(number)
                if action.kind is Kind.B and problem.tasks[number].whole_ticks is not None:
                    wholes.add(number)
        rows.append(tuple(row))
    return CellOrder(tuple(rows), frozenset(wholes))


def _parts(problem: StepProblem, rank: int, action: Action) -> tuple[Action, ...]:
    """The tasks that stand for an action."""
    dgrad = action._replace(kind=Kind.I)
    number = problem.place_of.get((rank, dgrad))
    if action.kind is not Kind.B or number is None:
        return (action,)
    return (dgrad,) if problem.tasks[number].whole_ticks is not None else (dgrad, action._replace(kind=Kind.W))


def as_schedule(problem: StepProblem, order: CellOrder, name: str = NAME) -> Schedule:
    """Return the schedule of an order."""
    rows: list[tuple[Cell, ...]] = []
    for row in order.rows:
        cells = []
        for number in row:
            action = problem.tasks[number].action
            cells.append(action._replace(kind=Kind.B) if number in order.wholes else action)
        rows.append(tuple(cells))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))


def change_name(schedule: Schedule, changed: Schedule) -> str:
    """Name a schedule whose actions were changed by `as_order` so that it says how."""
    changes = []
    if any(isinstance(cell, Pair) for row in schedule.rows for cell in row):
        changes.append("pairs apart")
    if changed.columns.kind.size > schedule.columns.kind.size:
        changes.append("backwards split")
    return ", ".join([schedule.name, *changes] if changes else [schedule.name, "micro-batches in order"])


def order_by(
    problem: StepProblem,
    starts: dict[int, int],
    wholes: frozenset[int] = frozenset(),
    arrivals: dict[int, int] | None = None,
) -> CellOrder:
    """Return the order of these start times, at one time of `arrivals` of what tasks send.

    The wgrads of whole backwards are left out.
    """
    rows = []
    sent = arrivals if arrivals is not None else {}
    for numbers in problem.by_rank:
        kept = [number for number in numbers if problem.dgrad_of(number) not in wholes]
        end = {n: starts[n] + _ticks(problem, n, wholes) for n in kept}
        key = {n: (starts[n], end[n], problem.depth[n], sent.get(n, 0), n) for n in kept}
        rows.append(_within_room(problem, sorted(kept, key=key.__getitem__), wholes))
    return CellOrder(tuple(rows), wholes)


def _within_room(problem: StepProblem, row: list[int], wholes: frozenset[int]) -> tuple[int, ...]:
    """Put a forward that does not fit after what frees its room: at one time, if that takes no time."""
    found: list[int] = []
    late: list[int] = []
    held = [0] * len(problem.budgets)
    for number in row:
        late.append(number)
        while (ready := next((n for n in late if _may_run(problem, n, held, late)), None)) is not None:
            late.remove(ready)
            found.append(ready)
            freed = [ready, *(n for n in problem.readers[ready] if ready in wholes and problem.dgrad_of(n) == ready)]
            for place, budget in enumerate(problem.budgets):
                held[place] += budget.taken[ready] - sum(budget.given[n] for n in freed)
    return (*found, *late)


def _may_run(problem: StepProblem, number: int, held: list[int], late: list[int]) -> bool:
    """Return True if a task fits a rank that holds so much, and waits for none of those that are late."""
    fits = (size + b.taken[number] <= b.limit for size, b in zip(held, problem.budgets, strict=True))
    return all(fits) and not any(edge.task in late for edge in problem.needs[number])


def _ticks(problem: StepProblem, number: int, wholes: frozenset[int]) -> int:
    whole = problem.tasks[number].whole_ticks
    return whole if number in wholes and whole is not None else problem.tasks[number].ticks


def start_times(problem: StepProblem, order: CellOrder) -> dict[int, int]:
    """Simulate an order: when each of its tasks starts, in the problem's unit."""
    program = lower(as_schedule(problem, order), problem.costs, problem.options)
    trace = simulate(program, problem.costs)
    starts: dict[int, int] = {}
    for lane in np.flatnonzero(program.lane_kind == LaneKind.COMPUTE):
        first, past = int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])
        times = (trace.start[first:past] // problem.scale).tolist()
        starts |= dict(zip(order.rows[int(program.lane_rank[lane])], times, strict=True))
    return starts
