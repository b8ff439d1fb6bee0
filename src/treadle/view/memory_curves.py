"""Memory of each rank over a trace, as steps to draw, and its unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle.ir.execute import Times
from treadle.ir.memory import changes, peaks, per_unit
from treadle.ir.trace import Trace


@dataclass(frozen=True, eq=False)
class Held:
    """A rank's memory: `size[i]` from `time[i]` on, in units of the clock; and its peak."""

    rank: int
    time: npt.NDArray[np.float64]
    size: npt.NDArray[np.float64]
    peak: float
    peak_time: float


@dataclass(frozen=True)
class MemoryUnit:
    """A unit of memory: `size` bytes, or saved activations, make one."""

    name: str
    size: float

    def show(self, value: float) -> str:
        """A number that a reader takes in at once."""
        return f"{value:.3g}"


def memory_unit(trace: Trace) -> MemoryUnit:
    """Chunks or layers where those are counted, else bytes in a handy size."""
    layout = trace.program.layout
    if layout.saved_unit != "bytes":
        name = {"activations": "chunks", "layers": "layers"}[layout.saved_unit]
        return MemoryUnit(name, float(per_unit(layout)))
    most = int(peaks(trace.program, Times(trace.start, trace.end)).size.max(initial=0))
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= size:
            return MemoryUnit(name, size)
    return MemoryUnit("bytes", 1.0)


def held(trace: Trace, ranks: range, unit: MemoryUnit) -> list[Held]:
    """The memory of each rank; at equal times giving back comes first, as in `peaks`."""
    program = trace.program
    what, taken, given = changes(program)
    taken, given = taken[what], given[what]
    rank_of = program.lane_rank[program.lane_of]
    most = peaks(program, Times(trace.start, trace.end))
    origin = int(trace.start.min()) if len(trace.start) else 0
    curves = []
    for rank in ranks:
        ops = np.flatnonzero(rank_of == rank)
        takes, gives = ops[taken[ops] > 0], ops[given[ops] > 0]
        time = np.r_[trace.end[gives], trace.start[takes]]
        delta = np.r_[-given[gives], taken[takes]]
        order = np.argsort(time, kind="stable")
        time, size = time[order], np.cumsum(delta[order])
        last = np.r_[time[1:] != time[:-1], True] if len(time) else np.zeros(0, bool)
        units = (time[last] - origin) / trace.clock.ticks
        peak_time = (int(most.time[rank]) - origin) / trace.clock.ticks
        curves.append(Held(rank, units, size[last] / unit.size, int(most.size[rank]) / unit.size, peak_time))
    return curves
