"""Traces beside each other: makespan, bubble and exposed communication, and of two traces of one program every op.

A prediction and a measurement have the same columns, so their difference is a subtraction. The wait of a measured
receive, send or collective for the ranks that come late is left out (see `treadle.simulator.waiting`): it is what some
other op was late by, and would count that again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.ir.show import peak_object
from treadle.ir.trace import Clock, Trace
from treadle.simulator.difference import Difference, difference, unlike
from treadle.simulator.metrics import Metrics, measure
from treadle.simulator.step_size import StepSize, held_text

if TYPE_CHECKING:
    from treadle.simulator.printed_step import ComparedJson, CompareJson, VersusJson


@dataclass(frozen=True)
class Versus:
    """A number, and by how much it differs from the first trace's. The ratio to nothing is None."""

    value: float
    difference: float
    ratio: float | None

    @classmethod
    def of(cls, value: float, first: float) -> Versus:
        """A number beside the first one."""
        return cls(value, value - first, value / first if first else None)

    def as_dict(self, show: Callable[[float], float] = float) -> VersusJson:
        """Return a dict for JSON; `show` turns ticks into units where the number is a time."""
        return {"value": show(self.value), "difference": show(self.difference), "ratio": self.ratio}


@dataclass(frozen=True)
class ComparisonRow:
    """One trace of a comparison; times are in ticks."""

    name: str
    metrics: Metrics
    makespan: Versus
    bubble: Versus
    exposed: Versus
    size: StepSize

    def as_dict(self, clock: Clock) -> ComparedJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "name": self.name,
            "bubble": self.bubble.as_dict(),
            "size": self.size.as_dict(),
            "peak": peak_object(self.metrics.peaks, self.metrics.peak_unit),
            "makespan": self.makespan.as_dict(clock.show),
            "exposed": self.exposed.as_dict(clock.show),
        }


@dataclass(frozen=True)
class Comparison:
    """A row for each trace and, for two traces of one program, the difference op by op; else `why_not` says why not.

    `held` says in a sentence which sizes all rows have in common, and which they do not or are not known.
    """

    clock: Clock
    rows: tuple[ComparisonRow, ...]
    ops: Difference | None
    why_not: str = ""

    @property
    def held(self) -> str:
        """The sizes that are the same in all rows, and those that are not."""
        return held_text([(row.name, row.size) for row in self.rows])

    def as_dict(self) -> CompareJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "unit": self.clock.unit,
            "held": self.held,
            "rows": [row.as_dict(self.clock) for row in self.rows],
            "ops": self.ops.as_dict(self.clock) if self.ops is not None else None,
            "why_not": self.why_not,
        }


def compare(traces: Sequence[tuple[str, Trace]]) -> Comparison:
    """Compare traces with the first one; two traces of one program op by op.

    Args:
        traces: pairs (name, trace), all on one clock.

    Returns:
        A row for each trace; `ops` has the ops of two traces of one program, or `why_not` says why there are none.

    Raises:
        ValueError: there is no trace, or their clocks differ.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), unit)
        >>> predicted = treadle.simulate(program, unit)
        >>> compare([("one", predicted), ("other", predicted)]).rows[1].makespan.ratio
        1.0

    """
    if not traces:
        raise ValueError("comparing needs at least one trace, got none")
    (first_name, first), *others = traces
    for name, trace in others:
        if trace.clock != first.clock:
            raise ValueError(
                f"{first_name!r} is in {_clock(first.clock)} and {name!r} in {_clock(trace.clock)}; times on different "
                "clocks do not compare: simulate both with costs of one unit"
            )
    rows = _rows([(name, measure(trace), StepSize.of(trace.program.layout)) for name, trace in traces])
    why_not = f"op by op takes two traces, got {len(traces)}"
    if len(traces) == 2:
        why_not = unlike(first.program, others[0][1].program)
    ops = difference(first, others[0][1]) if not why_not else None
    return Comparison(first.clock, rows, ops, why_not)


def _rows(measured: list[tuple[str, Metrics, StepSize]]) -> tuple[ComparisonRow, ...]:
    base = measured[0][1]
    return tuple(
        ComparisonRow(
            name,
            metrics,
            Versus.of(metrics.makespan, base.makespan),
            Versus.of(metrics.bubble, base.bubble),
            Versus.of(metrics.exposed, base.exposed),
            size,
        )
        for name, metrics, size in measured
    )


def _clock(clock: Clock) -> str:
    return f"{clock.unit} of {clock.ticks} ticks"
