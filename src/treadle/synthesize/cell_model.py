"""The CP-SAT model of a step: its tasks, each after what it needs, within the limits; the step's end is minimized."""

from __future__ import annotations

from typing import Any

from treadle.synthesize.evaluate import CellOrder, order_by
from treadle.synthesize.model_channels import add_channels
from treadle.synthesize.model_memory import add_memory
from treadle.synthesize.problem import StepProblem
from treadle.synthesize.solver import Solution, cp_model
from treadle.synthesize.task_model import TaskModel, Window


class CellModel(TaskModel):
    """A CP-SAT model of a problem."""

    def __init__(self, problem: StepProblem, *, most: int, least: int = 0, window: Window | None = None) -> None:
        """Build the model; the step ends after `least` to `most`, in the problem's unit."""
        super().__init__(problem, most=most, window=window)
        add_channels(self)
        self._add_needs()
        add_memory(self)
        self.makespan = self.cp.new_int_var(least, most, "makespan")
        for number in range(len(problem.tasks)):
            if not problem.readers[number]:
                self.cp.add(self.makespan >= self.end[number])
        self.cp.minimize(self.makespan)

    def _add_needs(self) -> None:
        for number, edges in enumerate(self.problem.needs):
            if self.is_fixed(number):
                continue
            for edge in edges:
                ready = self.arrival.get(edge.task)
                if ready is None or self.problem.tasks[edge.task].rank == self.problem.tasks[number].rank:
                    ready = self.end[edge.task] + edge.delay
                self.cp.add(self.start[number] >= ready)

    def order(self, found: Solution) -> CellOrder:
        """Return the order of a solution."""
        wholes = frozenset(number for number, variable in self.whole.items() if found.value(variable))
        starts, arrivals = ({n: found.value(time) for n, time in each.items()} for each in (self.start, self.arrival))
        return order_by(self.problem, starts, wholes, arrivals)

    def hint(self, starts: dict[int, int], wholes: frozenset[int], makespan: int) -> None:
        """Give the solver an order to begin with."""
        for number in range(len(self.problem.tasks)):
            self._hint_whole(number, wholes)
            if number in starts:
                self._hint(self.start[number], starts[number])
        self._hint(self.makespan, makespan)

    def _hint_whole(self, number: int, wholes: frozenset[int]) -> None:
        if number in self.whole:
            self._hint(self.whole[number], int(number in wholes))

    def _hint(self, variable: Any, value: int) -> None:
        if isinstance(variable, cp_model().IntVar):
            self.cp.add_hint(variable, value)
