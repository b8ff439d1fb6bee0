"""Several measured steps of one Program: when each op started and ended in each of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from treadle.ir.program import Longs, Program
from treadle.ir.trace import MICROSECONDS, Clock, Trace


@dataclass(frozen=True, eq=False, repr=False)
class Steps:
    """`start[s, i]` and `end[s, i]` are those of op i in the step whose number in the run is `numbers[s]`."""

    program: Program
    numbers: tuple[int, ...]
    start: Longs
    end: Longs
    clock: Clock = MICROSECONDS
    about: str = ""
    measured: bool = True

    def __post_init__(self) -> None:
        wanted = (len(self.numbers), self.program.num_ops)
        if not self.numbers or self.start.shape != wanted or self.end.shape != wanted:
            raise ValueError(
                f"steps have a start and an end for each step and op, {wanted}, and there is one step at least, "
                f"got {self.start.shape} and {self.end.shape}"
            )

    def __repr__(self) -> str:
        """Return the sizes: the columns are too long to read."""
        return f"<Steps: {len(self.numbers)} steps, {self.program.num_ranks} ranks, {self.program.num_ops} ops>"

    @classmethod
    def of(cls, trace: Trace) -> Steps:
        """One step."""
        return cls(trace.program, (0,), trace.start[None], trace.end[None], trace.clock, trace.about, trace.measured)

    @cached_property
    def makespans(self) -> Longs:
        """Ticks from the first start to the last end of each step."""
        return np.asarray(self.end.max(axis=1) - self.start.min(axis=1), np.int64)

    @cached_property
    def between(self) -> Longs:
        """Ticks from the end of each step to the begin of the next one: data loader, optimizer, checkpoint, logging.

        After a step whose successor was not measured, the median of the others; 0 where no two are neighbours.
        """
        first, numbers = self.start.min(axis=1), np.array(self.numbers)
        period = np.diff(first)
        known = (np.diff(numbers) == 1) & (period > 0)
        found = np.full(len(numbers), -1, np.int64)
        found[:-1][known] = np.maximum(period - self.makespans[:-1], 0)[known]
        usual = int(np.median(found[found >= 0])) if known.any() else 0
        return np.where(found >= 0, found, usual)

    @property
    def periods(self) -> Longs:
        """Ticks from the begin of each step to the begin of the next one."""
        return np.asarray(self.makespans + self.between, np.int64)

    @property
    def typical(self) -> int:
        """The number of the step whose makespan is the median's nearest."""
        middle = np.median(self.makespans)
        return self.numbers[int(np.argmin(np.abs(self.makespans - middle)))]

    def select(self, numbers: Collection[int]) -> Steps:
        """Return only these steps, in the order they have here."""
        if unknown := [number for number in numbers if number not in self.numbers]:
            raise ValueError(f"step {unknown[0]} was not measured; there are {_listed(self.numbers)}")
        chosen = [at for at, number in enumerate(self.numbers) if number in set(numbers)]
        kept = tuple(self.numbers[at] for at in chosen)
        return replace(self, numbers=kept, start=self.start[chosen], end=self.end[chosen])

    def trace(self, number: int | None = None) -> Trace:
        """One step as a Trace that begins at 0; the typical one where none is named."""
        number = self.typical if number is None else number
        if number not in self.numbers:
            raise ValueError(f"step {number} was not measured; there are {_listed(self.numbers)}")
        at = self.numbers.index(number)
        first = int(self.start[at].min())
        start, end = self.start[at] - first, self.end[at] - first
        return Trace(self.program, start, end, self.clock, f"{self.about}, step {number}", self.measured)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]}"
