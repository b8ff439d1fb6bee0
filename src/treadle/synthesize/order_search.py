"""The search for an order: schedules of ours, orders by rule and by pattern, then the solver, then repair."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from treadle.synthesize.cell_model import CellModel
from treadle.synthesize.evaluate import CellOrder, Weighed, as_order, as_schedule, change_name, start_times, weigh
from treadle.synthesize.greedy import greedy_orders
from treadle.synthesize.lower_bound import lower_bound
from treadle.synthesize.make_problem import fewer_microbatches
from treadle.synthesize.ours import our_schedules
from treadle.synthesize.pairs import most_rounded
from treadle.synthesize.problem import StepProblem
from treadle.synthesize.repair import repair
from treadle.synthesize.result import Standing, Synthesis
from treadle.synthesize.solver import SolverOptions, SolverRuns
from treadle.synthesize.stretch import few_microbatches, stretched

MOST_EXACT = 800
"""The most tasks that the solver is given at once; past that it repairs windows."""

_FIRST, _LAST = 0.25, 0.75
"""The solver proves for the first part of the time limit, improves, and proves again from the last part on."""

Progress = Callable[[Standing], None]


class OrderSearch:
    """The best schedule so far, the best order to search on from, and the bound."""

    def __init__(
        self,
        problem: StepProblem,
        options: SolverOptions,
        progress: Progress | None = None,
        *,
        began: float | None = None,
    ) -> None:
        """Prepare a search; its time counts from `began`, a reading of `time.monotonic`, or from now."""
        self.problem, self._progress = problem, progress
        self.search = SolverRuns(options, began if began is not None else time.monotonic())
        self.bound = lower_bound(problem)
        self.ours: Weighed | None = None
        self.best: Weighed | None = None
        self._order: CellOrder | None = None
        self._order_makespan = problem.work * problem.scale
        self._is_solved = False

    def run(self) -> Synthesis:
        """Search until the best is proven or the time is over, and return it.

        Raises:
            ValueError: no order keeps the limits, or none was found in time.

        """
        limit = self.search.options.time_limit_s
        self._weigh_ours()
        for order in greedy_orders(self.problem):
            self._offer(order, "greedy")
            if self.search.left_s <= 0:
                break
        if len(self.problem.tasks) <= MOST_EXACT:
            self._solve(until_s=_FIRST * limit if self._order is not None else limit)
            self._solve(until_s=_LAST * limit, neighbourhoods=True)
            self._solve(until_s=limit)
        else:
            self._stretch(until_s=_LAST * limit)
            self._repair(until_s=limit)
        return self._result()

    def _is_proven(self) -> bool:
        return self.best is not None and self.best.makespan <= self.bound * self.problem.scale

    def _weigh_ours(self) -> None:
        """Take the fastest schedule of ours, as it is; its order, without pairs, may be a start."""
        for schedule in our_schedules(self.problem):
            weighed = weigh(self.problem, schedule)
            if weighed is None:
                continue
            if self.ours is None or weighed.makespan < self.ours.makespan:
                self.ours = weighed
            self._keep(weighed)
            order = as_order(self.problem, schedule)
            if order is not None:
                self._offer(order, change_name(schedule, as_schedule(self.problem, order)))

    def _offer(self, order: CellOrder, source: str) -> None:
        """Weigh an order, and keep it if it is the best to search on from, or the best of all."""
        weighed = weigh(self.problem, as_schedule(self.problem, order), source)
        if weighed is None:
            return
        if self._order is None or weighed.makespan < self._order_makespan:
            self._order, self._order_makespan = order, weighed.makespan
        self._keep(weighed)

    def _keep(self, weighed: Weighed) -> None:
        if self.best is None or weighed.makespan < self.best.makespan:
            self.best = weighed
        self._report(weighed.makespan)

    def _solve(self, *, until_s: float, neighbourhoods: bool = False) -> None:
        """Give the solver all tasks at once: to prove, or to improve the order by neighbourhoods of its own."""
        seconds = min(until_s - self.search.elapsed_s, self.search.left_s)
        if self._is_proven() or self._is_solved or seconds <= 0:
            return
        scale = self.problem.scale
        most = self._order_makespan // scale
        model = CellModel(self.problem, most=most, least=self.bound)
        if self._order is not None:
            model.hint(start_times(self.problem, self._order), self._order.wholes, most)
        found, bound = self.search.solve(
            model.cp,
            seconds=seconds,
            neighbourhoods=neighbourhoods and self._order is not None,
            on_solution=lambda makespan: self._report(makespan * scale),
        )
        if self.problem.pairs is None:  # the solver knows of no pairs
            self.bound = max(self.bound, bound)
        if found is not None:
            self._is_solved = found.status == "OPTIMAL"
            self._offer(model.order(found), "solver")

    def _stretch(self, *, until_s: float) -> None:
        """SolverRuns an order of few micro-batches, and repeat its middle for all of them."""
        few = few_microbatches(self.problem, MOST_EXACT)
        seconds = min(until_s - self.search.elapsed_s, self.search.left_s)
        if few is None or self._is_proven() or seconds <= 0:
            return
        small = fewer_microbatches(self.problem, few)
        found = OrderSearch(small, replace(self.search.options, time_limit_s=seconds)).run()
        order = as_order(small, found.schedule)
        for candidate in dict.fromkeys(stretched(self.problem, small, order)) if order is not None else ():
            if self.search.left_s > 0:
                self._offer(candidate, "pattern")

    def _repair(self, *, until_s: float) -> None:
        if self._order is None or self._is_proven():
            return
        order = repair(
            self.problem,
            self._order,
            self._order_makespan,
            self.search,
            bound=self.bound,
            until_s=until_s,
            report=self._report,
        )
        self._offer(order, "repair")

    def _report(self, makespan: int) -> None:
        if self._progress is not None:
            best = min(makespan, self.best.makespan) if self.best is not None else makespan
            limit = self.search.options.time_limit_s
            self._progress(Standing(self.search.elapsed_s, limit, best, self.bound * self.problem.scale))

    def _result(self) -> Synthesis:
        if self.best is None:
            raise ValueError(
                f"no order that keeps the limits was found in {self.search.options.time_limit_s:g} s; "
                "give it more time, or a rank more memory"
            )
        if self.ours is not None and self.ours.makespan == self.best.makespan:
            self.best = self.ours
        bound = self.bound * self.problem.scale
        if bound <= self.best.makespan + most_rounded(self.problem):
            bound = min(bound, self.best.makespan)
        return Synthesis(
            schedule=self.best.schedule,
            makespan=self.best.makespan,
            lower_bound=bound,
            clock=self.problem.costs.clock,
            source=self.best.name,
            ours=self.ours.name if self.ours is not None else None,
            ours_makespan=self.ours.makespan if self.ours is not None else None,
            num_tasks=len(self.problem.tasks),
            seconds=self.search.elapsed_s,
        )
