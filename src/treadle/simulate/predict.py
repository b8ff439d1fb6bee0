"""The one execution under costs, as a Trace."""

from __future__ import annotations

import numpy as np

from treadle.costs import Costs, ticks
from treadle.ir.execute import execute
from treadle.ir.program import Program
from treadle.ir.trace import Trace


def simulate(program: Program, costs: Costs, *, slowness: float = 0.0, seed: int = 0) -> Trace:
    """Predict when each op starts and ends.

    Args:
        program: one that finishes.
        costs: how long ops take.
        slowness: each rank is slower by a random share of up to this much; 0.05 is 5 %.
        seed: of that share.

    Raises:
        ValueError: the program does not finish; `treadle.verify_program` says why.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = simulate(treadle.lower(treadle.generate("gpipe", pp=2, microbatches=2), unit), unit)
        >>> trace.clock.show(trace.makespan)
        9

    """
    factor = 1.0 + slowness * np.random.default_rng(seed).random(program.num_ranks) if slowness else None
    times = execute(program, ticks(program, costs, slowness=factor))
    if not times.finished:
        raise ValueError("the program does not finish: 'treadle verify' says why")
    about = f"predicted with costs {costs.name!r}" + (f", ranks up to {slowness:.0%} slower" if slowness else "")
    if program.layout.model_layers and not program.layout.by_layer:
        about += f", a model of {program.layout.model_layers} layers"
    return Trace(program, times.start, times.end, costs.clock, about)
