"""The tasks as intervals for CP-SAT: one at a time on a rank, in orders that are known.

A model is of all tasks, or of a window: tasks before the window keep their times, tasks after it keep their order, and
those inside are free. In the window's model a step's end is still the objective, as all tasks after it move along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from treadle.synthesize.evaluate import CellOrder
from treadle.synthesize.problem import StepProblem
from treadle.synthesize.solver import cp_model


@dataclass(frozen=True)
class Window:
    """Tasks that keep their times (`fixed`), tasks that keep their order (`after`, by rank). The others are free."""

    order: CellOrder
    fixed: dict[int, int] = field(default_factory=dict)
    after: tuple[tuple[int, ...], ...] = ()

    @property
    def followers(self) -> frozenset[int]:
        """The tasks after the window."""
        return frozenset(number for row in self.after for number in row)


class TaskModel:
    """The variables of a CP-SAT model. `start`, `end` and `arrival` are constants, variables or sums of them."""

    def __init__(self, problem: StepProblem, *, most: int, window: Window | None = None) -> None:
        """Add the tasks; the step ends after `most` at the latest, in the problem's unit."""
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

    def is_fixed(self, number: int) -> bool:
        """Return True for a task before the window."""
        return self.window is not None and number in self.window.fixed

    def is_free(self, number: int) -> bool:
        """Return True for a task whose place is to be found."""
        return not self.is_fixed(number) and number not in self.followers

    def first_after(self, rank: int) -> Any | None:
        """The start of the rank's first task after the window; None where there is none."""
        if self.window is None or not self.window.after or not self.window.after[rank]:
            return None
        return self.start[self.window.after[rank][0]]

    def _add_task(self, number: int) -> None:
        problem, task = self.problem, self.problem.tasks[number]
        dgrad = problem.dgrad_of(number)
        if dgrad is not None and problem.may_vanish(number):
            return self._add_wgrad(number, dgrad)
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

    def _add_wgrad(self, number: int, dgrad: int) -> None:
        """Add a wgrad that takes no time, right after its dgrad, if that is a whole backward."""
        ticks, whole = self.problem.tasks[number].ticks, self.whole[dgrad]
        if isinstance(whole, int) and whole == 1:
            self.start[number] = self.end[number] = self.end[dgrad]
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
            self.cp.add(self.start[number] == self.end[dgrad]).only_enforce_if(whole)
        if self.is_free(number):
            self._intervals[number] = interval

    def _add_ranks(self) -> None:
        """A rank does one task at a time: those before the window, the free ones in any order, those after it."""
        for rank, numbers in enumerate(self.problem.by_rank):
            free = [number for number in numbers if number in self._intervals]
            self.cp.add_no_overlap([self._intervals[number] for number in free])
            done = max((self.end[number] for number in numbers if self.is_fixed(number)), default=0)
            after = self.first_after(rank)
            if after is not None:
                self.cp.add(after >= done)
            for number in free:
                if done:
                    self.cp.add(self.start[number] >= done)
                if after is not None:
                    self.cp.add(after >= self.end[number])

    def _add_orders(self) -> None:
        """Tasks after the window keep their order; micro-batches that are alike have one in each stage."""
        for row in self.window.after if self.window is not None else ():
            for before, number in pairwise(row):
                self.cp.add(self.start[number] >= self.end[before])
        for of, numbers in self.problem.by_class.items():
            for before, number in pairwise(numbers if self.problem.is_ordered(of) else ()):
                if self.is_free(before) or self.is_free(number):
                    self.cp.add(self.start[number] >= self.end[before])
