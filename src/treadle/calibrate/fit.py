"""Constants fitted to runs: the most likely ones, given what the cluster had before.

Before, the logarithm of each constant is the cluster's, give or take `width_of`. Measured steps scatter about estimates
by `MODEL_ERROR`. Both are in `treadle.estimate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle.calibrate.constants_of_job import untold_by, width_of
from treadle.calibrate.path_form import PathForm
from treadle.estimate import Cluster
from treadle.estimate.log_fit import Floats, LogPrior, most_likely

ROUNDS = 8
"""Simulations of each run, at most, until its longest path is known where the fit ends."""

NEAR = 1e-3
"""Relative difference at which a path is as long as the simulated step."""


class FittedLogs(NamedTuple):
    """Logarithms of how much longer things take, and for each constant how much the runs told.

    `told` is from 0 (no run depends on it) to 1 (nothing is left of the prior): one minus the variance that is left,
    over the one before.
    """

    logs: Floats
    told: Floats


def fit_paths(forms: Sequence[PathForm], seconds: Sequence[float], cluster: Cluster) -> FittedLogs:
    """Fit the logarithms of constants to measured steps.

    Args:
        forms: one for each run, all with the same keys.
        seconds: what was measured.
        cluster: decides which runs can tell which constants.

    """
    keys = forms[0].keys
    tells = np.array([[key not in untold_by(form.job, cluster) for key in keys] for form in forms])
    width, logs, told = np.array([width_of(key) for key in keys]), np.zeros(len(keys)), np.zeros(len(keys))
    measured = np.log(seconds)
    for _ in range(ROUNDS):
        seen = (tells * [form.shares() for form in forms]).max(axis=0) > 0

        def form_of(free: Floats, seen: Floats = seen) -> tuple[Floats, Floats]:
            whole = np.zeros(len(keys))
            whole[seen] = free
            slopes = np.array([form.slopes(whole) for form in forms]) * tells
            return np.log([form.seconds(whole) for form in forms]), slopes[:, seen]

        found = most_likely(form_of, measured, LogPrior(np.zeros(int(seen.sum())), width[seen]), steps=40)
        logs, told = np.zeros(len(keys)), np.zeros(len(keys))
        logs[seen], told[seen] = found.logs, 1 - (found.left / width[seen]) ** 2
        short = [form for form in forms if form.simulated(logs) > (1 + NEAR) * form.seconds(logs)]
        if not short:
            break
        for form in short:
            form.add_path(logs)
    return FittedLogs(logs, told)
