"""Logarithms of constants, fitted to logarithms of measured times: the most likely ones, given a prior.

Each logarithm is known before to be about `mean`, with `covariance`. Times scatter about those of the form by
`MODEL_ERROR`; errors beyond `HUBER` count linearly, so that one wild run does not bend all others. Gauss-Newton steps
find the most likely values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MODEL_ERROR = 0.1
"""Relative error that estimates have, about: how strongly runs speak against priors."""

HUBER = 0.1
"""Errors beyond this count linearly."""

Floats = npt.NDArray[np.float64]

LogForm = Callable[[Floats], tuple[Floats, Floats]]
"""From logarithms of constants: logarithms of times, and their slopes `[time, constant]`."""


class LogPrior(NamedTuple):
    """Mean, covariance and bounds of the logarithms, before anything is measured."""

    mean: Floats
    covariance: Floats
    least: Floats
    most: Floats


class LogFit(NamedTuple):
    """The most likely logarithms, and how uncertain each still is: its standard deviation."""

    logs: Floats
    left: Floats


def most_likely(
    form: LogForm, measured: Floats, prior: LogPrior, steps: int = 20, error: float = MODEL_ERROR
) -> LogFit:
    """Return the logarithms of constants that are most likely within their bounds, given logarithms of measured times.

    A logarithm at a bound that the times would push further stays there; the others are solved for without it.
    """
    weight = np.linalg.inv(prior.covariance)
    logs = prior.mean.copy()
    curvature = weight
    for _ in range(steps):
        estimated, slopes = form(logs)
        off = measured - estimated
        trust = 1 / np.maximum(1.0, np.abs(off) / HUBER) / error**2
        curvature = slopes.T @ (slopes * trust[:, None]) + weight
        downhill = slopes.T @ (trust * off) + weight @ (prior.mean - logs)
        free = ~((logs <= prior.least) & (downhill < 0) | (logs >= prior.most) & (downhill > 0))
        change = np.zeros(len(logs))
        change[free] = np.linalg.solve(curvature[np.ix_(free, free)], downhill[free])
        moved = np.clip(logs + np.clip(change, -1.0, 1.0), prior.least, prior.most) - logs
        logs = logs + moved
        if np.abs(moved).max(initial=0.0) < 1e-5:
            break
    return LogFit(np.asarray(logs), np.sqrt(np.diag(np.linalg.inv(curvature))))
