"""The problem that the solver is given: tasks with durations, what they need, and what ranks may hold.

A task is an action; a message takes its time between two tasks. What tasks need is what the dependency rule says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from treadle.costs import Costs
from treadle.ir import Action, Kind, Placement
from treadle.ir.schedule import Channel
from treadle.lowering import LoweringOptions
from treadle.synthesize.limits import MemoryLimits

Place = tuple[int, Action]
"""A rank and an action on it."""


class TaskNeed(NamedTuple):
    """A need of a task: the task that fills it, and the ticks of the message between them."""

    task: int
    delay: int


class TaskClass(NamedTuple):
    """What the tasks of all micro-batches of one stage and kind have in common."""

    rank: int
    kind: Kind
    chunk: int


@dataclass(frozen=True)
class Task:
    """An action on its rank. `whole_ticks` is set on an dgrad that may run as a whole backward instead."""

    rank: int
    action: Action
    ticks: int
    whole_ticks: int | None = None

    @property
    def of(self) -> TaskClass:
        """The class of the task."""
        return TaskClass(self.rank, self.action.kind, self.action.chunk)


@dataclass(frozen=True)
class Budget:
    """A limit on every rank: a task takes `taken` at its start and gives `given` back at its end."""

    limit: int
    taken: tuple[int, ...]
    given: tuple[int, ...]
    unit: str
    """What is limited: activations or bytes."""


@dataclass(frozen=True)
class StageHold:
    """What one stage's forwards hold until their releases, in the order of micro-batches; `room` of them fit a rank."""

    forwards: tuple[int, ...]
    releases: tuple[int, ...]
    room: int


@dataclass(frozen=True)
class PairTimes:
    """What overlapped pairs (F|B) take at least: `inside` one that holds a forward or a whole backward, in all.

    `added[forward]` is what a pair takes more than its backward by itself.
    """

    inside: dict[Place, int]
    added: dict[Place, int]


@dataclass(frozen=True)
class StepProblem:
    """All cells of a step, without their order.

    Times are in `scale` ticks of the costs' clock: the largest unit in which all of them are whole.
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    options: LoweringOptions
    limits: MemoryLimits
    tasks: tuple[Task, ...]
    needs: tuple[tuple[TaskNeed, ...], ...]
    scale: int
    budgets: tuple[Budget, ...]
    alike: bool
    """All micro-batches take and save the same, so their order in a stage may be taken as given."""
    pairs: PairTimes | None = None
    """Where the costs make an overlapped (F|B) faster than F and B apart, in this unit; no task is such a pair."""
    place_of: dict[Place, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def splits(self) -> bool:
        """Return True if backwards are split into dgrad and wgrad."""
        return any(task.action.kind is Kind.W for task in self.tasks)

    @cached_property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The tasks of each rank."""
        rows: list[list[int]] = [[] for _ in range(self.placement.pp)]
        for number, task in enumerate(self.tasks):
            rows[task.rank].append(number)
        return tuple(map(tuple, rows))

    @cached_property
    def by_class(self) -> dict[TaskClass, tuple[int, ...]]:
        """The tasks of each class, in the order of micro-batches."""
        found: dict[TaskClass, list[int]] = {}
        for number, task in enumerate(self.tasks):
            found.setdefault(task.of, []).append(number)
        return {kind: tuple(numbers) for kind, numbers in found.items()}

    @cached_property
    def channels(self) -> dict[Channel, tuple[int, ...]]:
        """The tasks that send on each channel."""
        found: dict[Channel, set[int]] = {}
        for number, edges in enumerate(self.needs):
            for edge in edges:
                src, dst = self.tasks[edge.task].rank, self.tasks[number].rank
                if src != dst:
                    found.setdefault((src, dst), set()).add(edge.task)
        return {channel: tuple(sorted(senders)) for channel, senders in found.items()}

    @cached_property
    def send_ticks(self) -> dict[int, int]:
        """The ticks of the message that a task sends, of those that send one."""
        return {
            edge.task: edge.delay
            for number, edges in enumerate(self.needs)
            for edge in edges
            if self.tasks[edge.task].rank != self.tasks[number].rank
        }

    @cached_property
    def shortest(self) -> tuple[int, ...]:
        """The least ticks of each task, outside of pairs."""
        return self.shortest_with({n: t.whole_ticks for n, t in enumerate(self.tasks) if t.whole_ticks is not None})

    def shortest_with(self, wholes: dict[int, int]) -> tuple[int, ...]:
        """The least ticks of each task, if dgrads may run as whole backwards of these ticks.

        A whole backward is then an dgrad, or less, with what is left of it as the wgrad: the two take no
        longer than it, nor than dgrad and wgrad.
        """
        found = [min(task.ticks, wholes.get(number, task.ticks)) for number, task in enumerate(self.tasks)]
        for number, task in enumerate(self.tasks):
            dgrad = self.dgrad_of(number)
            if dgrad is not None and dgrad in wholes:
                found[number] = min(self.tasks[dgrad].ticks + task.ticks, wholes[dgrad]) - found[dgrad]
        return tuple(found)

    @cached_property
    def single_holds(self) -> tuple[StageHold, ...]:
        """The budgets of ranks on which they are a distance: a forward waits for the release `room` before it.

        That is so where micro-batches are alike, and a rank has one stage whose memory is given back at once.
        """
        found = [self.single_hold(budget, rank) for budget in self.budgets for rank in range(self.placement.pp)]
        return tuple(hold for hold in found if hold is not None)

    def single_hold(self, budget: Budget, rank: int) -> StageHold | None:
        """The hold of a rank with one stage; None where memory is not a distance."""
        numbers = self.by_rank[rank]
        takers = tuple(number for number in numbers if budget.taken[number])
        givers = tuple(number for number in numbers if budget.given[number])
        sizes = {budget.taken[number] for number in takers} | {budget.given[number] for number in givers}
        classes = {self.tasks[number].of for number in (*takers, *givers)}
        if not self.alike or len(sizes) != 1 or len(classes) != 2 or not all(map(self.is_ordered, classes)):
            return None
        return StageHold(takers, givers, budget.limit // sizes.pop())

    def dgrad_of(self, number: int) -> int | None:
        """The dgrad that a wgrad belongs to; None for other tasks."""
        task = self.tasks[number]
        return self.place_of[task.rank, task.action._replace(kind=Kind.I)] if task.action.kind is Kind.W else None

    def forward_of(self, number: int) -> int:
        """The forward of a task's micro-batch in its stage."""
        task = self.tasks[number]
        return self.place_of[task.rank, task.action._replace(kind=Kind.F)]

    def may_vanish(self, number: int) -> bool:
        """Return True for a wgrad whose dgrad may run as a whole backward."""
        dgrad = self.dgrad_of(number)
        return dgrad is not None and self.tasks[dgrad].whole_ticks is not None

    def is_ordered(self, of: TaskClass) -> bool:
        """Return True if each order stands for one that runs this class by micro-batch: the k-th to start is called k.

        That is not so of wgrads where some of them are inside whole backwards.
        """
        return self.alike and not self.may_vanish(self.by_class[of][0])

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """The longest chain of needs before each task, counted: tasks that start at one time run in this order."""
        found: dict[int, int] = {}
        for number in self.topological:
            found[number] = max((found[edge.task] + 1 for edge in self.needs[number]), default=0)
        return tuple(found[number] for number in range(len(self.tasks)))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """The tasks, each after all that it needs."""
        waiting = {number: len(edges) for number, edges in enumerate(self.needs)}
        ready = [number for number, count in waiting.items() if count == 0]
        for number in ready:
            for reader in self.readers[number]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    ready.append(reader)
        return tuple(ready)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The tasks that need each task."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for number, edges in enumerate(self.needs):
            for edge in edges:
                found[edge.task].append(number)
        return tuple(map(tuple, found))

    def queues(self, channel: Channel) -> bool:
        """Return True if a message of the channel may have to wait for one before it."""
        senders = self.channels[channel]
        longest = max(self.send_ticks[sender] for sender in senders)
        return min(self.shortest[sender] for sender in senders) < longest

    @property
    def work(self) -> int:
        """Ticks of all tasks and messages one after another: no sensible order takes longer."""
        return sum(self.send_ticks.values()) + sum(max(task.ticks, task.whole_ticks or 0) for task in self.tasks)
