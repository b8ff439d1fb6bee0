"""A budget of CPU for tests that draw: so many draws at least, on any machine, and more while it lasts.

    def test_mutations_are_judged_alike(budget: Budget) -> None:
        for number in budget.draws(least=200, cpu_s=20.0):
            ...
        budget.covered(f"{len(kinds)} kinds of mutations")

What a test asserts of all draws together must hold of the `least` ones. `pytest --budget 10`, as the nightly workflow
runs it, has ten times of both. What was covered is printed at the end of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.support.cpu_time import tree_seconds


class Budget:
    """What one test may use."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.told: list[str] = []
        self._began = tree_seconds(os.getpid())
        self._drawn = 0

    @property
    def used_s(self) -> float:
        """CPU seconds since the test began, its processes included."""
        return tree_seconds(os.getpid()) - self._began

    def draws(self, least: int, cpu_s: float = 0.0) -> Iterator[int]:
        """Numbers from 0: `least` of them, and more until the test has used `cpu_s` in all."""
        least, cpu_s = round(least * self.factor), cpu_s * self.factor
        number = 0
        while number < least or self.used_s < cpu_s:
            yield number
            number += 1
            self._drawn += 1

    def covered(self, what: str) -> None:
        """Has this printed at the end of the run, with the draws and the CPU they took."""
        draws = f"{self._drawn} draws, " if self._drawn else ""
        self.told.append(f"{what}: {draws}{self.used_s:.1f} s of CPU")
