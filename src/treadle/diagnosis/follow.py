"""A run in progress, step by step: what became slower than it was, and since which step.

Each series (the step, and each worker against the others) is compared with its own past. A value is high if it exceeds
the median of the 20 to 50 steps before by 5 % and by five standard deviations. Two high values in a row begin an alarm,
two others end it; high values are no past. A worker's value is its compute time over that of the middle worker: what
slows all of them slows the step, and accuses none.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from treadle.diagnosis.whatif import WhatIf
from treadle.diagnosis.why_report import analyse
from treadle.ir.steps import Steps

LEAST_PAST, MOST_PAST = 20, 50
"""Steps of the past that a value is compared with; nothing is judged before there are as many as the first."""
LEAST_RISE = 0.05
DEVIATIONS = 5
IN_A_ROW = 2
STEP = "step"


@dataclass(frozen=True)
class Alarm:
    """A series that is high. `what` is STEP, or the worker's name; `rise` is over its past."""

    what: str
    since: int
    rise: float

    def __str__(self) -> str:
        """Return the alarm as a line prints it."""
        subject = "steps are" if self.what == STEP else f"{self.what} is"
        return f"{subject} {self.rise:.0%} slower since step {self.since:,}"


@dataclass(frozen=True)
class Observed:
    """A measured step: seconds from its begin to its end, the slowdown and cause of its files, compute by worker."""

    number: int
    seconds: float
    slowdown: float
    cause: str
    compute_s: dict[str, float]


@dataclass(frozen=True)
class FollowedStep:
    """A step with the alarms that are on after it."""

    observed: Observed
    alarms: tuple[Alarm, ...]

    def __str__(self) -> str:
        """Return one line of text."""
        seen = self.observed
        states = "; ".join(map(str, self.alarms)) or "as before"
        return f"step {seen.number:,}  {seen.seconds:.4g} s  slowdown {seen.slowdown:.3f}x  {states}"


@dataclass
class Series:
    """One number a step, and whether it is high."""

    past: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_PAST))
    high: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_PAST))
    since: int | None = None
    num_low: int = 0

    def add(self, number: int, value: float) -> None:
        """Take the value of a step."""
        if not self._is_high(value):
            self.num_low += 1
            if self.since is None or self.num_low >= IN_A_ROW:
                self.since = None
                self.high.clear()
                self.past.append(value)
            return
        self.num_low = 0
        self.high.append((number, value))
        if self.since is None and len(self.high) >= IN_A_ROW:
            self.since = self.high[0][0]

    @property
    def rise(self) -> float:
        """How much the high values are over the past."""
        return statistics.median(value for _, value in self.high) / statistics.median(self.past) - 1

    def _is_high(self, value: float) -> bool:
        if len(self.past) < LEAST_PAST:
            return False
        usual, mean = statistics.median(self.past), sum(self.past) / len(self.past)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in self.past) / (len(self.past) - 1))
        return value > usual * (1 + LEAST_RISE) and value > usual + DEVIATIONS * deviation


class Follower:
    """Takes the steps of a run in their order, and keeps the alarms that are on."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, observed: Observed) -> FollowedStep:
        """Take a step."""
        values = sorted(observed.compute_s.values())
        middle = values[(len(values) - 1) // 2] if values else 0.0
        now = {STEP: observed.seconds}
        now |= {name: took / middle for name, took in observed.compute_s.items() if middle > 0}
        for name, value in now.items():
            if math.isfinite(value) and value > 0:
                self._series.setdefault(name, Series()).add(observed.number, value)
        return FollowedStep(observed, self.alarms)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What is high now, the highest first; steps after workers."""
        found = [Alarm(name, each.since, each.rise) for name, each in self._series.items() if each.since is not None]
        return tuple(sorted(found, key=lambda alarm: (alarm.what == STEP, -alarm.rise)))


def observe(steps: Steps, first: int | None = None) -> Iterator[Observed]:
    """Return the steps of some files one by one, numbered from `first` on, or as they are."""
    whatif = WhatIf.of(steps)
    report = analyse(steps, whatif)
    one = steps.trace(steps.numbers[0])
    tick = one.seconds / one.makespan
    names = [
        f"rank {place} of replica {replica}" if report.dp > 1 else f"rank {place}"
        for place in range(report.pp)
        for replica in range(report.dp)
    ]
    for at, number in enumerate(steps.numbers):
        busy = np.bincount(whatif.worker, np.where(whatif.computes, whatif.measured[at], 0), minlength=len(names))
        yield Observed(
            number if first is None else first + at,
            float(steps.makespans[at]) * tick,
            report.by_step[number],
            report.cause.sentence,
            dict(zip(names, map(float, busy * tick), strict=True)),
        )
