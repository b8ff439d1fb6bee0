"""The solver's seconds by the work it has done, so that a time limit means the same on every machine."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treadle.synthesize import order_search, solver, synthesis

EACH_RUN_S = 0.01
"""What a run counts besides: preparing a model is no work of the solver's."""


class WorkClock:
    """Stands for `time` and for OR-Tools: seconds pass while the solver works, as CP-SAT counts its work."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds of work so far."""
        return self.now

    def cp_model(self, module: ModuleType) -> SimpleNamespace:
        """OR-Tools' module with a solver that is limited by work, on one thread at a time, in turn."""
        clock = self

        class Solver(module.CpSolver):  # type: ignore[misc, name-defined]  # its base comes with the import
            """Solves the same way every time."""

            wall_time = 0.0

            def solve(self, *args: Any) -> Any:
                self.parameters.max_deterministic_time = self.parameters.max_time_in_seconds
                self.parameters.max_time_in_seconds = 1e9
                self.parameters.interleave_search = True
                status = super().solve(*args)
                self.wall_time = self.response_proto.deterministic_time
                clock.now += EACH_RUN_S + self.wall_time
                return status

        return SimpleNamespace(**{**vars(module), "CpSolver": Solver})


@pytest.fixture
def by_work(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    """Time limits of this test are limits of work: a second of them is a few of CPU."""
    clock, imported = WorkClock(), solver.cp_model
    monkeypatch.setattr(solver, "cp_model", lambda: clock.cp_model(imported()))
    for module in (solver, order_search, synthesis):
        monkeypatch.setattr(module, "time", clock)
    return clock
