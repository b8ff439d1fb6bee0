"""One fit of a measured run for all commands, and how far the step predicted with it is from the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.costs import Costs
from treadle.ir.show import show_time
from treadle.ir.steps import Steps
from treadle.simulator.fitting import fit
from treadle.simulator.predict import simulate
from treadle.simulator.stage_fitting import fit_stages

CLOSE = 0.01
"""A prediction that is off by at most this share is not commented on."""


@dataclass(frozen=True)
class FittedRun:
    """Costs, the step that they predict for the run's own program, and the measured one, in ticks."""

    costs: Costs
    predicted: int
    measured: float

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measured step."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def in_words(self) -> str:
        """How far the prediction is off; empty where it is close."""
        if abs(self.error) <= CLOSE:
            return ""
        clock, way = self.costs.clock, "short" if self.error < 0 else "long"
        return (
            f"of this run's step of {show_time(clock, self.measured)}, the fitted costs predict "
            f"{show_time(clock, self.predicted)}, {abs(self.error):.1%} too {way}: medians leave out what varies"
        )

    @property
    def of_head(self) -> str:
        """What the last stage takes longer, and counts as the head, in words; empty where that is less than a layer."""
        costs = self.costs
        layer = sum(costs.model.get(name, 0) for name in "fb") / max(costs.model.get("layers", 0), 1)
        head = costs.ends.get("head_f", 0) + costs.ends.get("head_b", 0)
        if not layer or head < layer:
            return ""
        return (
            f"what the last stage takes longer counts as its head, {head / layer:.1f} layers' time; to tell the head "
            "from slow layers or a slow machine, time it alone, or put another machine in its place"
        )


def fit_run(steps: Steps, blocks: Sequence[str] | None = None, *, number: int | None = None) -> FittedRun:
    """Fit costs to a run, and predict its step again with them.

    Args:
        steps: measured ones.
        blocks: of each stage, as `fit_stages` takes them.
        number: at the grain of layers the step that is fitted; the typical one if left out.

    Raises:
        ValueError: there are blocks for another number of stages.

    """
    program = steps.program
    if program.layout.by_layer:
        trace = steps.trace(number)
        costs = fit(trace)
        return FittedRun(costs, simulate(program, costs).makespan, trace.makespan)
    costs = fit_stages(steps, blocks)
    if blocks is not None:
        program = replace(program, layout=replace(program.layout, blocks=tuple(blocks)))
    return FittedRun(costs, simulate(program, costs).makespan, float(np.median(steps.makespans)))
