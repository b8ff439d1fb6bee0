"""The tasks as intervals for CP-SAT: one at a time on a rank, each behind what it needs, within the limits.

A model is of all tasks, or of a window: tasks before the window keep their times, tasks behind it keep their order, and
those inside are free. In the window's model a step's end is still the objective, as all tasks behind it move along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from treadle.synthesize.evaluate import CellOrder, order_by
from treadle.synthesize.model_channels import add_channels
from treadle.synthesize.model_memory import add_memory
from treadle.synthesize.problem import StepProblem
from treadle.synthesize.solver import Solution, cp_model


@dataclass(frozen=True)
class Window:
    """Tasks that keep their times (`fixed`), tasks that keep their order (`behind`, by rank). The others are free."""

    order: CellOrder
    fixed: dict[int, int] = field(default_factory=dict)
    behind: tuple[tuple[int, ...], ...] = ()

    @property
    def followers(self) -> frozenset[int]:
        """The tasks behind the window."""
        return frozenset(number for row in self.behind for number in row)


class CellModel:
    """A CP-SAT model of a problem. `start`, `end` and `arrival` are constants, variables or sums of them."""

    def __init__(self, problem: StepProblem, *, most: int, least: int = 0, window: Window | None = None) -> None:
        """Build the model; the step ends after `least` to `most`, in the problem's unit."""
        self.problem, self.window = problem, window
        self.cp = cp_model().CpModel()
        self.most = most
        self.followers = window.followers if window is not None else frozenset()
        self.start: dict[int, Any] = {}
        self.end: dict[int, Any] = {}
        self.arrival: dict[int, Any] = {}
        self.whole: dict[int, Any] = {}
        self._intervals: dict[int, Any] = {}
        for number in problem.topological:
            self._add_task(number)
        self._add_ranks()
        self._add_orders()
        add_channels(self)
        self._add_needs()
        add_memory(self)
        self.makespan = self.cp.new_int_var(least, most, "makespan")
        for number in range(len(problem.tasks)):
            if not problem.readers[number]:
                self.cp.add(self.makespan >= self.end[number])
        self.cp.minimize(self.makespan)

    def is_fixed(self, number: int) -> bool:
        """True for a task before the window."""
        return self.window is not None and number in self.window.fixed

    def is_free(self, number: int) -> bool:
        """True for a task whose place is to be found."""
        return not self.is_fixed(number) and number not in self.followers

    def first_behind(self, rank: int) -> Any | None:
        """The start of the rank's first task behind the window; None where there is none."""
        if self.window is None or not self.window.behind or not self.window.behind[rank]:
            return None
        return self.start[self.window.behind[rank][0]]

    def _add_task(self, number: int) -> None:
        problem, task = self.problem, self.problem.tasks[number]
        half = problem.half_of(number)
        if half is not None and problem.may_vanish(number):
            return self._add_weight_half(number, half)
        if self.is_fixed(number):
            assert self.window is not None
            is_whole = number in self.window.order.wholes
            self.whole[number] = int(is_whole)
            self.start[number] = self.window.fixed[number]
            ticks = task.whole_ticks if is_whole and task.whole_ticks is not None else task.ticks
            self.end[number] = self.start[number] + ticks
            return None
        self.start[number] = self.cp.new_int_var(0, self.most, "")
        if task.whole_ticks is None:
            self.end[number] = self.start[number] + task.ticks
            size: Any = task.ticks
        else:
            self.whole[number] = self._whole(number)
            size = task.ticks + (task.whole_ticks - task.ticks) * self.whole[number]
            self.end[number] = self.cp.new_int_var(0, self.most, "")
        interval = self.cp.new_interval_var(self.start[number], size, self.end[number], "")
        if self.is_free(number):
            self._intervals[number] = interval
        return None

    def _whole(self, number: int) -> Any:
        if self.is_free(number):
            return self.cp.new_bool_var("")
        assert self.window is not None
        return int(number in self.window.order.wholes)

    def _add_weight_half(self, number: int, half: int) -> None:
        """Add a weight half that takes no time, right behind its input half, if that is a whole backward."""
        ticks, whole = self.problem.tasks[number].ticks, self.whole[half]
        if isinstance(whole, int) and whole == 1:
            self.start[number] = self.end[number] = self.end[half]
            return
        if self.is_fixed(number):
            assert self.window is not None
            self.start[number] = self.window.fixed[number]
            self.end[number] = self.start[number] + ticks
            return
        self.start[number] = self.cp.new_int_var(0, self.most, "")
        self.end[number] = self.cp.new_int_var(0, self.most, "")
        size = ticks - ticks * whole
        interval = self.cp.new_interval_var(self.start[number], size, self.end[number], "")
        if not isinstance(whole, int):
            self.cp.add(self.start[number] == self.end[half]).only_enforce_if(whole)
        if self.is_free(number):
            self._intervals[number] = interval

    def _add_ranks(self) -> None:
        """A rank does one task at a time: those before the window, the free ones in any order, those behind it."""
        for rank, numbers in enumerate(self.problem.by_rank):
            free = [number for number in numbers if number in self._intervals]
            self.cp.add_no_overlap([self._intervals[number] for number in free])
            done = max((self.end[number] for number in numbers if self.is_fixed(number)), default=0)
            after = self.first_behind(rank)
            if after is not None:
                self.cp.add(after >= done)
            for number in free:
                if done:
                    self.cp.add(self.start[number] >= done)
                if after is not None:
                    self.cp.add(after >= self.end[number])

    def _add_orders(self) -> None:
        """Tasks behind the window keep their order; micro-batches that are alike have one in each stage."""
        for row in self.window.behind if self.window is not None else ():
            for before, number in pairwise(row):
                self.cp.add(self.start[number] >= self.end[before])
        for of, numbers in self.problem.by_class.items():
            for before, number in pairwise(numbers if self.problem.is_ordered(of) else ()):
                if self.is_free(before) or self.is_free(number):
                    self.cp.add(self.start[number] >= self.end[before])

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
        """Tell the solver of an order it can begin with."""
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
