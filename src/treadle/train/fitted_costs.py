"""Costs of a run's ops: fitted to a traced step, kept beside the run, read by the next dry run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.costs import Costs, dump, load_costs
from treadle.ir.trace import Trace
from treadle.simulator import fit, simulate
from treadle.train.run_config import TrainConfig

NAME = "costs.toml"
"""The file of a run's costs in its output directory."""


_TIMES = ("cells", "layer", "dense", "ends", "message", "step")


def fit_step(trace: Trace) -> Costs:
    """Fit costs to a step so that the step, simulated with them, takes as long as it took.

    `treadle.fit` has the median duration of each kind of op. A step takes longer than its medians: lanes take time from
    op to op, and ops that vary keep each other waiting, the more the fewer cores a rank has to itself. So all times are
    multiplied by one factor, which `about` names.
    """
    costs = fit(trace)
    predicted = simulate(trace.program, costs).makespan
    if not predicted:
        return costs
    factor = trace.makespan / predicted
    times: dict[str, Any] = {
        name: {key: value if key == "layers" else round(value * factor) for key, value in getattr(costs, name).items()}
        for name in _TIMES
    }
    return replace(costs, about=f"{costs.about}, times {factor:.3g} for what is between ops", **times)


def write_costs(trace: Trace, output: Path) -> None:
    """Fit costs to a measured step and write them to OUTPUT/costs.toml."""
    (output / NAME).write_text(dump(fit_step(trace), comments=True), encoding="utf-8")


def find_costs(config: TrainConfig) -> tuple[Costs, str] | None:
    """Return the costs that a configuration names, or those of an earlier run in its output, and where they are from.

    Raises:
        ValueError: the file that it names is not there or has no costs.

    """
    path = config.costs or str(Path(config.output) / NAME)
    if not config.costs and not Path(path).is_file():
        return None
    return load_costs(path), path
