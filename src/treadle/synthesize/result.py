"""What a synthesis reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from treadle.ir import Schedule
from treadle.ir.trace import Clock

if TYPE_CHECKING:
    from treadle.synthesize.printed_synthesis import SynthesisJson


class Standing(NamedTuple):
    """How far a search is: seconds, of how many, the best makespan and the bound, in ticks."""

    seconds: float
    time_limit_s: float
    makespan: int
    lower_bound: int


@dataclass(frozen=True)
class Synthesis:
    """A schedule, its simulated makespan, and a makespan that no order can beat.

    Times are in ticks of `clock`. `source` says where the order comes from: the name of a schedule of ours, with what
    is changed in it, greedy, pattern, solver or repair. `ours` is the fastest schedule of ours that keeps placement and
    limits, if any does.

    Raises:
        AssertionError: the bound is above the makespan, so it is none.

    """

    schedule: Schedule
    makespan: int
    lower_bound: int
    clock: Clock
    source: str
    ours: str | None
    ours_makespan: int | None
    num_tasks: int
    seconds: float

    def __post_init__(self) -> None:
        if self.lower_bound > self.makespan:  # no `assert`: python -O leaves those out
            raise AssertionError(
                f"no order is to be faster than {self.clock.show(self.lower_bound)} {self.clock.unit}, and this one by "
                f"{self.source} takes {self.clock.show(self.makespan)}: the bound is wrong, please report it"
            )

    @property
    def proven(self) -> bool:
        """Return True if no order is faster."""
        return self.makespan == self.lower_bound

    @property
    def gap(self) -> float:
        """How much longer than the bound the step is, as a share of the bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def gain(self) -> float | None:
        """How much shorter than ours the step is, as a share of ours; None where none of ours fits."""
        return 1 - self.makespan / self.ours_makespan if self.ours_makespan else None

    def as_dict(self) -> SynthesisJson:
        """Return the figures, times in units."""
        show = self.clock.show
        return {
            "unit": self.clock.unit,
            "makespan": show(self.makespan),
            "lower_bound": show(self.lower_bound),
            "gap": self.gap,
            "proven": self.proven,
            "source": self.source,
            "best_of_ours": self.ours,
            "best_of_ours_makespan": show(self.ours_makespan) if self.ours_makespan is not None else None,
            "gain": self.gain,
            "tasks": self.num_tasks,
            "seconds": round(self.seconds, 3),
        }
