"""A better cut of a run's model, tried before it is proposed: fitted to the run, balanced, simulated again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.ir.program import Layout
from treadle.ir.steps import Steps
from treadle.planner.balance import balance_blocks
from treadle.planner.stage_costs import model_blocks
from treadle.simulator.fitted_run import FittedRun, fit_run
from treadle.simulator.predict import simulate

ASSUMED_LAYERS = 4
"""Layers of a stage whose blocks no profile names."""

GAINS = 0.01
"""The share of a step that a cut saves that is proposed."""


@dataclass(frozen=True)
class TriedCut:
    """The blocks of the stages as they ran or are assumed, those of the balanced cut, and its step in ticks."""

    blocks: tuple[str, ...]
    balanced: tuple[str, ...]
    fitted: FittedRun
    makespan: int

    @property
    def gain(self) -> float:
        """The share of the fitted step that the balanced cut saves."""
        return 1 - self.makespan / self.fitted.predicted if self.fitted.predicted else 0.0

    @property
    def pays(self) -> bool:
        """Say whether the cut is worth proposing."""
        return self.gain >= GAINS


def try_cut(steps: Steps) -> TriedCut:
    """Fit costs to a run, cut the model by them as `treadle balance` does, and simulate the run with that cut.

    Raises:
        ValueError: the costs do not cut the model: of steps at the grain of layers, or of stages without layers.

    """
    program = steps.program
    blocks = program.layout.blocks if all(program.layout.blocks) else assumed_blocks(program.layout)
    fitted = fit_run(steps, blocks)
    balanced = balance_blocks(fitted.costs, model_blocks(fitted.costs), len(blocks))
    layout = replace(program.layout, blocks=balanced)
    return TriedCut(blocks, balanced, fitted, simulate(replace(program, layout=layout), fitted.costs).makespan)


def assumed_blocks(layout: Layout) -> tuple[str, ...]:
    """Return blocks of stages whose layers no profile names, with embedding and head at the ends."""
    first, *others = ["t" * ASSUMED_LAYERS] * layout.placement.num_stages
    *others, last = [f"E{first}", *others]
    return *others, f"{last}L"
