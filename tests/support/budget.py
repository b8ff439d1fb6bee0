"""A budget of CPU for tests that draw: so many draws at least, on any machine, and more while it lasts.

    def test_mutations_are_judged_alike(budget: Budget) -> None:
        random = budget.random("mutations")
        for number in budget.draws(least=200, cpu_s=20.0):
            ...
        budget.covered(f"{len(kinds)} kinds of mutations")

What a test asserts of all draws together must hold of the `least` ones. `pytest --budget 10`, as the nightly workflow
runs it, has ten times of both. What was covered is printed at the end of a run.

By day draws are the same on every machine. `--seed N` makes others: at night N is the date. A test that fails then says
the row to add to `KEPT`, which is run by day from then on, and mended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tests.support.cpu_time import tree_seconds


class KeptDraw(NamedTuple):
    """A draw that failed once: of a test, by its path and name, under a seed, the number of the draw."""

    test: str
    seed: int
    number: int


KEPT: list[KeptDraw] = []
"""Each runs by day beside the test's own draws, in all of its cases."""


class Budget:
    """What one test may use."""

    def __init__(self, factor: float, seed: int = 0, last: int = -1) -> None:
        self.factor, self.seed, self._last = factor, seed, last
        self.told: list[str] = []
        self._began = tree_seconds(os.getpid())
        self._drawn = 0

    @property
    def used_s(self) -> float:
        """CPU seconds since the test began, its processes included."""
        return tree_seconds(os.getpid()) - self._began

    def draws(self, least: int, cpu_s: float = 0.0) -> Iterator[int]:
        """Numbers from 0: `least` of them, and more until the test has used `cpu_s` in all."""
        least, cpu_s = max(round(least * self.factor), self._last + 1), cpu_s * self.factor
        number = 0
        while number < least or self.used_s < cpu_s:
            yield number
            number += 1
            self._drawn += 1

    def random(self, of: str | int) -> Random:
        """Return the random numbers of a test's own name, or of one draw: others under another seed."""
        return Random(f"{self.seed}/{of}" if self.seed else of)

    def drawn(self, test: str) -> str:
        """Return how the last draw of a test is repeated, and kept."""
        row = KeptDraw(test.partition("[")[0], self.seed, max(self._drawn, self._last, 0))
        return f"again: pytest '{test}' --seed {self.seed} --budget {self.factor:g}; to keep it, add to KEPT: {row}"

    def covered(self, what: str) -> None:
        """Has this printed at the end of the run, with the draws and the CPU they took."""
        draws = f"{self._drawn} draws, " if self._drawn else ""
        self.told.append(f"{what}: {draws}{self.used_s:.1f} s of CPU")
