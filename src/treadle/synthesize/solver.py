"""OR-Tools' CP-SAT: imported when it is first used, run within a time limit, with a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treadle.host.extras import brought_by

_EARLY_S = 0.5
"""Seconds before its time limit at which CP-SAT may end by itself: on a busy machine it is careful not to be late."""


def cp_model() -> Any:
    """Import CP-SAT, or raise an error that names the package."""
    with brought_by("plan", needed_by="synthesizing a schedule"):
        from ortools.sat.python import cp_model as imported

        return imported


@dataclass(frozen=True)
class SolverOptions:
    """How long and how the solver searches.

    Args:
        time_limit_s: seconds for all of it, preparation included.
        workers: threads of the solver.
        seed: of its randomness.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> SolverOptions(time_limit_s=10).workers
        2

    """

    time_limit_s: float = 60.0
    workers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.time_limit_s > 0:
            raise ValueError(f"a time limit is more than 0 seconds, got {self.time_limit_s}")
        if self.workers < 1:
            raise ValueError(f"the solver has 1 worker or more, got {self.workers}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"a seed is a whole number from 0 to {2**31 - 1}, got {self.seed}")


@dataclass(frozen=True)
class Solution:
    """What the solver found. `value` reads a variable; constants are themselves."""

    status: str
    bound: int
    value: Callable[[Any], int]


@dataclass
class SolverRuns:
    """Solves models until the time is over."""

    options: SolverOptions
    began: float = field(default_factory=time.monotonic)
    solved: int = 0
    interrupted: bool = False
    """Ctrl-C ended a run: the solver returns what it has, and no other run follows."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; none once interrupted."""
        return 0.0 if self.interrupted else self.options.time_limit_s - self.elapsed_s

    def solve(
        self,
        cp: Any,
        *,
        seconds: float,
        neighbourhoods: bool = False,
        on_solution: Callable[[int], None] | None = None,
    ) -> tuple[Solution | None, int]:
        """Solve a model; return the best solution, if any, and a bound of its objective.

        The n-th model has a seed of its own. With `neighbourhoods` the solver improves its hint and proves nothing.
        `on_solution(objective)` is called for every better solution.
        """
        module = cp_model()
        solver = module.CpSolver()
        solver.parameters.num_workers = self.options.workers
        solver.parameters.random_seed = (self.options.seed * 10007 + self.solved) % 2**31
        limit = max(0.01, min(seconds, self.left_s))
        solver.parameters.max_time_in_seconds = limit
        solver.parameters.use_lns_only = neighbourhoods
        self.solved += 1
        status = solver.solve(cp, _callback(module, on_solution))
        undecided = status in (module.FEASIBLE, module.UNKNOWN)
        self.interrupted = self.interrupted or (undecided and solver.wall_time < limit - max(_EARLY_S, 0.1 * limit))
        bound = int(-(-solver.best_objective_bound // 1)) if status != module.INFEASIBLE else 0
        if status not in (module.OPTIMAL, module.FEASIBLE):
            return None, max(0, bound)

        def value(variable: Any) -> int:
            return variable if isinstance(variable, int) else int(solver.value(variable))

        return Solution(solver.status_name(status), bound, value), bound


def _callback(module: Any, on_solution: Callable[[int], None] | None) -> Any:
    if on_solution is None:
        return None

    class Reporter(module.CpSolverSolutionCallback):  # type: ignore[misc]  # its base comes with the import
        """Reports every solution."""

        def on_solution_callback(self) -> None:
            assert on_solution is not None
            on_solution(int(self.objective_value))

    return Reporter()
