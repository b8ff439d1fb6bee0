"""A Trace: when each op of a Program started and ended. Predicted by the simulator or measured by the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.notebook import ShownInNotebooks
from treadle.ir.program import Longs, Program


@dataclass(frozen=True)
class Clock:
    """A unit of time: `ticks` make one `unit`. Traces store ticks, people read units."""

    unit: str
    ticks: int

    def show(self, ticks: float) -> float:
        """Convert ticks to units; an int where the result is whole."""
        value = ticks / self.ticks
        return int(value) if value == int(value) else value


MICROSECONDS = Clock("us", 1000)
"""Real time: a tick is a nanosecond, people read microseconds."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace(ShownInNotebooks):
    """Start and end of each op, in ticks of the clock. `about` says what was assumed or where it was measured.

    Example:
        >>> schedule, unit = treadle.generate("1f1b", pp=2, microbatches=2), treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(schedule, unit), unit)
        >>> trace.clock.show(trace.makespan)
        9

    """

    program: Program
    start: Longs
    end: Longs
    clock: Clock = MICROSECONDS
    about: str = ""
    measured: bool = False

    def __repr__(self) -> str:
        """Return the size, the makespan and the source: the columns are too long to read."""
        program, unit = self.program, "" if self.clock.unit == "unit" else f" {self.clock.unit}"
        makespan = f"{self.clock.show(self.makespan):.6g}{unit}"
        return f"<Trace: {program.num_ranks} ranks, {program.num_ops} ops, makespan {makespan}; {self.about}>"

    @property
    def makespan(self) -> int:
        """Ticks from the first start to the last end."""
        if not len(self.end):
            return 0
        return int(self.end.max() - self.start.min())
