"""Rows of published measurements, the errors of predictions for them, and small robust fits."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
OFF = 0.15
"""Rows off by more than this share are listed with their cause."""


@dataclass(frozen=True)
class Miss:
    """A row that was predicted badly."""

    row: str
    predicted: float
    measured: float
    error: float
    """predicted / measured - 1."""

    cause: str


@dataclass(frozen=True)
class Prediction:
    """A held-out row, predicted and measured in the same unit."""

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


def misses_of(predictions: Sequence[Prediction], cause: Callable[[Prediction], str]) -> list[Miss]:
    """Return the predictions off by more than `OFF`, the worst first, each with its cause."""
    off = [each for each in predictions if abs(each.error) > OFF]
    off.sort(key=lambda each: -abs(each.error))
    return [Miss(each.row, each.predicted, each.measured, each.error, cause(each)) for each in off]
