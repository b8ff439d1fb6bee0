"""A Trace: when each op of a Program started and ended. Predicted by the simulator or measured by the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.clock_units import SECONDS
from treadle.ir.notebook_forms import ShownInNotebooks
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
    """Start and end of each op, in ticks of the clock. `about` is what was assumed or where it was measured.

    Example:
        >>> trace = treadle.simulate(treadle.generate("1f1b", pp=2, microbatches=2), "deepseek-v3-h800")
        >>> round(trace.seconds, 3)
        0.18

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

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end.

        Raises:
            ValueError: the clock counts units, which have no length in seconds.

        """
        if self.clock.unit not in SECONDS:
            raise ValueError(
                f"this trace counts in {self.clock.unit}s, which have no length in seconds; "
                "trace.clock.show(trace.makespan) counts them, and costs in microseconds give seconds"
            )
        return self.makespan / self.clock.ticks * SECONDS[self.clock.unit]
