"""The one execution under costs, as a Trace."""

from __future__ import annotations

import numpy as np

from treadle.costs import Costs, ticks
from treadle.ir.execute import execute
from treadle.ir.program import Program
from treadle.ir.trace import Trace


def simulate(program: Program, costs: Costs, *, slowness: float = 0.0, seed: int = 0) -> Trace:
    """When each op starts and ends. `slowness` makes each rank slower by a random share of up to that much."""
    factor = 1.0 + slowness * np.random.default_rng(seed).random(program.num_ranks) if slowness else None
    times = execute(program, ticks(program, costs, slowness=factor))
    if not times.finished:
        raise ValueError("the program does not finish: 'treadle verify' says why")
    about = f"predicted with costs {costs.name!r}" + (f", ranks up to {slowness:.0%} slower" if slowness else "")
    return Trace(program, times.start, times.end, costs.clock, about)
