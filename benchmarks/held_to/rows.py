"""Rows of published measurements, and the errors of predictions for them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
OFF = 0.15
"""Rows off by more than this share are listed."""


@dataclass(frozen=True)
class Prediction:
    """A row, predicted and measured in the same unit."""

    row: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The signed share that the prediction is off by."""
        return self.predicted / self.measured - 1


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of data/NAME.csv as text; lines that begin with # are comments."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def absolute_errors(predictions: Iterable[Prediction]) -> list[float]:
    """Return the absolute errors, as shares, the smallest first."""
    return sorted(abs(each.error) for each in predictions)


def spread(predictions: Iterable[Prediction]) -> dict[str, float]:
    """Return median, mean, 90th percentile and maximum of the absolute errors, as shares."""
    errors = absolute_errors(predictions)
    return {
        "median": statistics.median(errors),
        "mean": statistics.fmean(errors),
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "max": errors[-1],
    }


def misses_of(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions off by more than `OFF`, the worst first."""
    return sorted((each for each in predictions if abs(each.error) > OFF), key=lambda each: -abs(each.error))
