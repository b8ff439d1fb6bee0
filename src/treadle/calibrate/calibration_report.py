"""What a calibration found: constants before and after, and runs beside their estimates."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.calibrate.runs_file import MeasuredRun
from treadle.estimate import Cluster

if TYPE_CHECKING:
    from treadle.calibrate.printed_calibration import CalibrateJson

SUSPICIOUS = 0.15
"""A run that is off by more than this share after fitting is pointed out."""


def show_constant(value: float) -> str:
    """Return a constant in four digits.

    Example:
        >>> show_constant(59200.0), show_constant(0.75523)
        ('59200', '0.7552')

    """
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class FittedConstant:
    """A constant of [efficiency], before and after."""

    name: str
    before: float
    after: float
    told: float
    """How much the runs constrain it: 0 nothing, 1 all; the share of the prior's variance that they take away."""

    @property
    def moved(self) -> bool:
        """The constant is another one now."""
        return self.after != self.before


@dataclass(frozen=True)
class EstimatedRun:
    """A measured run and its estimates, in seconds, each as `treadle plan` prints it."""

    run: MeasuredRun
    before: float
    after: float
    left_out: float | None
    """With constants fitted to all other runs; None where there are too few."""

    memory_bytes: int
    over_bytes: int
    """Bytes that the estimate has too many for the GPU, which held the run."""

    @property
    def seconds(self) -> float:
        """The measured step."""
        return self.run.seconds

    def error(self, estimate: float) -> float:
        """Return the share by which an estimate is off."""
        return estimate / self.seconds - 1

    @property
    def suspicious(self) -> bool:
        """The fitted estimate is far off: the model or the row is wrong."""
        return abs(self.error(self.after)) > SUSPICIOUS


@dataclass(frozen=True)
class CalibrationReport:
    """A cluster with fitted constants, and how well they fit."""

    before: Cluster
    cluster: Cluster
    constants: tuple[FittedConstant, ...]
    runs: tuple[EstimatedRun, ...]

    @property
    def moved(self) -> tuple[FittedConstant, ...]:
        """Constants that the runs moved, those they constrain most first."""
        return tuple(each for each in self.constants if each.moved)

    @property
    def untold(self) -> tuple[str, ...]:
        """Constants that no run depends on."""
        return tuple(each.name for each in self.constants if each.told == 0)

    def median(self, which: str) -> float | None:
        """Return the median of the absolute errors before, after or left_out, as a share."""
        estimates = [(each, getattr(each, which)) for each in self.runs]
        errors = [abs(each.error(estimate)) for each, estimate in estimates if estimate is not None]
        return statistics.median(errors) if errors else None

    def as_dict(self) -> CalibrateJson:
        """Return a dict for JSON."""
        before, after = self.median("before"), self.median("after")
        assert before is not None
        assert after is not None
        return {
            "cluster": self.cluster.name,
            "gpus": self.cluster.num_gpus,
            "runs": [
                {
                    "name": each.run.name,
                    "line": each.run.line,
                    "measured_s": each.seconds,
                    "before_s": each.before,
                    "after_s": each.after,
                    "left_out_s": each.left_out,
                    "memory_bytes": each.memory_bytes,
                    "over_bytes": each.over_bytes,
                    "suspicious": each.suspicious,
                }
                for each in self.runs
            ],
            "median_error": {"before": before, "after": after, "left_out": self.median("left_out")},
            "moved": [
                {"name": each.name, "before": each.before, "after": each.after, "told": each.told}
                for each in self.moved
            ],
            "untold": list(self.untold),
            "efficiency": dict(self.cluster.efficiency),
        }
