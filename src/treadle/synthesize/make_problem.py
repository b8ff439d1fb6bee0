"""From a placement, costs and limits to the problem that the solver is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from treadle.costs import Costs
from treadle.ir import Action, Kind, Placement
from treadle.ir.dependency import needs
from treadle.ir.show import show_held
from treadle.lowering import LoweringOptions
from treadle.synthesize.limits import MemoryLimits
from treadle.synthesize.pairs import pair_times
from treadle.synthesize.problem import Budget, PairTimes, Place, StepProblem, Task, TaskNeed
from treadle.synthesize.sizes import StepSizes, read_sizes

MOST_TASKS = 30_000
"""Past that, preparing and simulating orders takes longer than a person waits."""


def make_problem(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    *,
    options: LoweringOptions | None = None,
    limits: MemoryLimits | None = None,
    whole: bool = False,
) -> StepProblem:
    """Read the tasks of a step off the Program of a plain schedule of the same size.

    Args:
        placement: of stages on ranks.
        microbatches: of the step, of all pipes together.
        costs: durations and sizes.
        options: the model, at the grain of cells.
        limits: what a rank may hold.
        whole: keep every backward whole; otherwise it is split into dgrad and wgrad, and is whole where the costs make
            that faster.

    Raises:
        ValueError: the size does not fit the placement, or a micro-batch does not fit the limits.

    """
    options = options if options is not None else LoweringOptions()
    limits = limits if limits is not None else MemoryLimits()
    num_tasks = placement.pp * placement.vpp * (microbatches // placement.num_pipes) * (2 if whole else 3)
    if num_tasks > MOST_TASKS:
        raise ValueError(
            f"an order is searched for at most {MOST_TASKS} forwards, dgrads and wgrads, got {num_tasks}; "
            "take fewer micro-batches: from twice as many as ranks on, the middle of a step repeats itself"
        )
    sizes = {split: read_sizes(placement, microbatches, costs, options, split=split) for split in (False, True)}
    split, wholes = sizes[True], sizes[False]
    tasks: list[Task] = []
    for place, ticks in (wholes if whole else split).ticks.items():
        rank, action = place
        tasks.append(Task(rank, action, ticks, None if whole else _shorter_whole(place, split, wholes)))
    chosen = wholes if whole else split
    scale = gcd(*chosen.messages.values(), *(t.ticks for t in tasks), *(t.whole_ticks or 0 for t in tasks)) or 1
    tasks = [
        Task(t.rank, t.action, t.ticks // scale, None if t.whole_ticks is None else t.whole_ticks // scale)
        for t in tasks
    ]
    place_of = {(task.rank, task.action): number for number, task in enumerate(tasks)}
    problem = StepProblem(
        placement=placement,
        num_microbatches=microbatches,
        costs=costs,
        options=options,
        limits=limits,
        tasks=tuple(tasks),
        needs=tuple(_edges(placement, task, place_of, chosen.messages, scale) for task in tasks),
        scale=scale,
        budgets=tuple(_budgets(limits, tasks, chosen)),
        alike=not costs.microbatch,
        pairs=_scaled(pair_times(placement, costs, options, wholes.ticks), scale),
        place_of=place_of,
    )
    _check_room(problem)
    return problem


def fewer_microbatches(problem: StepProblem, microbatches: int) -> StepProblem:
    """Return the same problem with another number of micro-batches."""
    return make_problem(
        problem.placement,
        microbatches,
        problem.costs,
        options=problem.options,
        limits=problem.limits,
        whole=not problem.splits,
    )


def _shorter_whole(place: Place, split: StepSizes, wholes: StepSizes) -> int | None:
    """The ticks of a whole backward, where that is faster than dgrad and wgrad."""
    rank, action = place
    if action.kind is not Kind.I:
        return None
    together = wholes.ticks[rank, action._replace(kind=Kind.B)]
    apart = split.ticks[place] + split.ticks[rank, action._replace(kind=Kind.W)]
    return together if together < apart else None


def _edges(
    placement: Placement, task: Task, place_of: dict[Place, int], messages: dict[Place, int], scale: int
) -> tuple[TaskNeed, ...]:
    edges = []
    for peer, fillers in needs(placement, task.rank, task.action):
        filled = next(place_of[peer, filler] for filler in fillers if (peer, filler) in place_of)
        delay = messages[_read_by(task.rank, task.action)] // scale if peer != task.rank else 0
        edges.append(TaskNeed(filled, delay))
    return tuple(edges)


def _read_by(rank: int, action: Action) -> Place:
    """The message that an action reads: its label is F or B, the micro-batch and the reader's chunk."""
    return rank, action if action.kind is Kind.F else action._replace(kind=Kind.B)


def _budgets(limits: MemoryLimits, tasks: list[Task], sizes: StepSizes) -> Iterator[Budget]:
    if limits.max_activations is not None:
        last = Kind.W if any(task.action.kind is Kind.W for task in tasks) else Kind.B
        taken = tuple(int(task.action.kind is Kind.F) for task in tasks)
        given = tuple(int(task.action.kind is last) for task in tasks)
        yield Budget(limits.max_activations, taken, given, "activations")
    if limits.memory_limit is not None:
        if sizes.unit != "bytes":
            raise ValueError(
                "a memory limit is in bytes, and the costs do not say what layers save; add [saved_bytes] and layers "
                "to the costs, or limit max_activations"
            )
        taken = tuple(sizes.taken[task.rank, task.action] for task in tasks)
        given = tuple(sizes.given[task.rank, task.action] for task in tasks)
        yield Budget(limits.memory_limit, taken, given, "bytes")


def _check_room(problem: StepProblem) -> None:
    """Refuse limits that no order keeps: a micro-batch is on all chunks of a rank before its first backward there."""
    for budget in problem.budgets:
        least, rank = max(
            (_least_held(problem, budget, numbers), -rank) for rank, numbers in enumerate(problem.by_rank)
        )
        if least > budget.limit:
            holds, limit, enough = (show_held(size, budget.unit) for size in (least, budget.limit, _rounded(least)))
            raise ValueError(
                f"rank {-rank} holds {holds} of one micro-batch between its forward and its backward, and the limit "
                f"is {limit}; give it {enough} or more, or fewer chunks"
            )


def _least_held(problem: StepProblem, budget: Budget, numbers: Iterable[int]) -> int:
    """Return what a rank with these tasks holds at least at some time."""
    held: dict[tuple[int, int], int] = {}
    for number in numbers:
        action = problem.tasks[number].action
        key = problem.placement.pipes[action.chunk], action.mb
        held[key] = held.get(key, 0) + budget.taken[number]
    return max(held.values())


def _rounded(size: int) -> int:
    """Round up to the four digits that are shown, so that what is shown is enough."""
    step: int = 10 ** max(0, len(str(size)) - 4)
    return -(-size // step) * step


def _scaled(pairs: PairTimes | None, scale: int) -> PairTimes | None:
    """The same in the problem's unit, rounded down."""
    if pairs is None:
        return None
    inside, added = ({place: ticks // scale for place, ticks in each.items()} for each in (pairs.inside, pairs.added))
    return PairTimes(inside, added)
