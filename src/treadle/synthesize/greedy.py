"""Orders made by a rule: each rank runs what is ready, the most urgent first, within its memory.

They are what the search starts from where no schedule of ours keeps the limits, or where stages differ so much that
the order of a schedule made for equal stages is a poor start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from treadle.ir import Kind
from treadle.synthesize.evaluate import CellOrder, order_by
from treadle.synthesize.problem import StepProblem, TaskClass

_URGENCIES = (
    {Kind.I: 0, Kind.B: 0, Kind.F: 1, Kind.W: 2},
    {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2},
    {Kind.I: 0, Kind.B: 0, Kind.W: 1, Kind.F: 2},
)


@dataclass(frozen=True)
class _Rule:
    """The urgency of kinds, lowest first. With `patient`, no wgrad starts just before something more urgent."""

    urgency: dict[Kind, int]
    patient: bool


def greedy_orders(problem: StepProblem) -> Iterator[CellOrder]:
    """Yield an order for each rule that leads to an end."""
    for urgency, patient in product(_URGENCIES, (False, True)):
        starts = _Run(problem, _Rule(urgency, patient)).starts()
        if starts is not None:
            yield order_by(problem, starts)


class _Run:
    """One pass through the step; of each stage and kind, the micro-batches run in order."""

    def __init__(self, problem: StepProblem, rule: _Rule) -> None:
        self.problem, self.rule = problem, rule
        self.queues: list[dict[TaskClass, tuple[int, ...]]] = [{} for _ in problem.by_rank]
        for of, numbers in problem.by_class.items():
            self.queues[of.rank][of] = numbers
        self.done = dict.fromkeys(problem.by_class, 0)
        self.free_at = [0] * len(problem.by_rank)
        self.sent_at = dict.fromkeys(problem.channels, 0)
        self.arrival: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.held = [[0] * len(problem.budgets) for _ in problem.by_rank]

    def starts(self) -> dict[int, int] | None:
        """Start times of all tasks; None where the rule ends with tasks that cannot run."""
        starts: dict[int, int] = {}
        choices = {rank: self._choose(rank) for rank in range(len(self.queues))}
        while len(starts) < len(self.problem.tasks):
            found = [(start, rank, number) for rank, (start, number) in _known(choices)]
            if not found:
                return None
            start, rank, number = min(found)
            starts[number] = start
            self._run(rank, number, start)
            touched = {rank, *(self.problem.tasks[reader].rank for reader in self.problem.readers[number])}
            choices |= {each: self._choose(each) for each in touched}
        return starts

    def _choose(self, rank: int) -> tuple[int, int] | None:
        """The next task of a rank and its start, as far as is known by now."""
        now = self.free_at[rank]
        open_ = [
            (max(now, ready), self.rule.urgency[of.kind], number)
            for of, number in self._heads(rank)
            if (ready := self._ready(number)) is not None and self._fits(rank, number)
        ]
        if not open_:
            return None
        soonest = min(start for start, *_ in open_)
        start, urgency, number = min((each for each in open_ if each[0] == soonest), key=lambda each: each[1:])
        if self.rule.patient and self.problem.tasks[number].action.kind is Kind.W:
            until = start + self.problem.tasks[number].ticks
            sooner = [each for each in open_ if each[0] < until and each[1] < urgency]
            if sooner:
                start, _, number = min(sooner)
        return start, number

    def _heads(self, rank: int) -> Iterator[tuple[TaskClass, int]]:
        for of, numbers in self.queues[rank].items():
            if self.done[of] < len(numbers):
                yield of, numbers[self.done[of]]

    def _ready(self, number: int) -> int | None:
        """When all that a task needs is there; None if that is not known yet."""
        times = []
        for edge in self.problem.needs[number]:
            if edge.task not in self.end:
                return None
            here = self.problem.tasks[edge.task].rank == self.problem.tasks[number].rank
            times.append(self.end[edge.task] if here else self.arrival[edge.task])
        return max(times, default=0)

    def _fits(self, rank: int, number: int) -> bool:
        """Return True if a task fits, with room left for the rest of the oldest micro-batch that is on its way."""
        for held, budget in zip(self.held[rank], self.problem.budgets, strict=True):
            taken = budget.taken[number]
            if taken and held + taken + self._reserved(rank, number, budget.taken) > budget.limit:
                return False
        return True

    def _reserved(self, rank: int, number: int, taken: tuple[int, ...]) -> int:
        """What the oldest micro-batch on the rank, if it is another one, has yet to take."""
        forwards = [(of, self.queues[rank][of]) for of in self.queues[rank] if of.kind is Kind.F]
        oldest = min(self.done[of] for of, _ in forwards)
        if self.problem.tasks[number].action.mb <= oldest:
            return 0
        return sum(taken[numbers[oldest]] for of, numbers in forwards if self.done[of] == oldest)

    def _run(self, rank: int, number: int, start: int) -> None:
        problem, task = self.problem, self.problem.tasks[number]
        self.done[task.of] += 1
        self.end[number] = self.free_at[rank] = start + task.ticks
        for place, budget in enumerate(problem.budgets):
            self.held[rank][place] += budget.taken[number] - budget.given[number]
        for reader in problem.readers[number]:
            channel = rank, problem.tasks[reader].rank
            if channel in self.sent_at:
                self.sent_at[channel] = max(self.end[number], self.sent_at[channel]) + problem.send_ticks[number]
                self.arrival[number] = self.sent_at[channel]


def _known(choices: dict[int, tuple[int, int] | None]) -> Iterator[tuple[int, tuple[int, int]]]:
    for rank, choice in choices.items():
        if choice is not None:
            yield rank, choice
