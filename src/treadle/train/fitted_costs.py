"""Costs of a run's ops: fitted to a traced step, kept beside the run, read by the next dry run."""

from __future__ import annotations

from pathlib import Path

from treadle.costs import Costs, dump, load_costs
from treadle.ir.trace import Trace
from treadle.simulate import fit
from treadle.train.config import TrainConfig

NAME = "costs.toml"
"""The file of a run's costs in its output directory."""


def write_costs(trace: Trace, output: Path) -> None:
    """Fit costs to a measured step and write them to OUTPUT/costs.toml."""
    (output / NAME).write_text(dump(fit(trace), comments=True), encoding="utf-8")


def find_costs(config: TrainConfig) -> tuple[Costs, str] | None:
    """Return the costs that a configuration names, or those of an earlier run in its output, and where they are from.

    Raises:
        ValueError: the file that it names is not there or has no costs.

    """
    path = config.costs or str(Path(config.output) / NAME)
    if not config.costs and not Path(path).is_file():
        return None
    try:
        return load_costs(path), path
    except OSError as error:
        raise ValueError(f"costs is a file that `treadle.fit` made, got {path!r}: {error.strerror}") from error
