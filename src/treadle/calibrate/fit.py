"""Constants fitted to runs: the most likely ones, given what is believed of the cluster before.

`treadle.calibrate.prior` has what is believed. Measured steps scatter about estimates by `MODEL_ERROR`. Runs of the
same job count as one: what an estimate gets wrong of a job, it gets wrong every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from treadle.calibrate.constants_of_job import untold_by
from treadle.calibrate.log_fit import Floats, most_likely
from treadle.calibrate.path_form import PathForm
from treadle.calibrate.prior import prior_of_constants
from treadle.estimate import Cluster

ROUNDS = 8
"""Simulations of each run, at most, until its longest path is known where the fit ends."""

NEAR = 1e-3
"""Relative difference at which a path is as long as the simulated step."""

_STEPS = 40


class FittedLogs(NamedTuple):
    """Logarithms of how much longer things take, and for each constant how much the runs constrain it.

    `told` is from 0 (no run depends on it) to 1 (nothing is left of the prior): one minus the variance that is left,
    over the one before.
    """

    logs: Floats
    told: Floats


def fit_paths(forms: Sequence[PathForm], seconds: Sequence[float], cluster: Cluster) -> FittedLogs:
    """Fit the logarithms of constants to measured steps.

    Args:
        forms: one for each run, all with the same keys; runs of one job share theirs.
        seconds: what was measured.
        cluster: decides which runs constrain which constants.

    """
    measured: dict[PathForm, list[float]] = {}
    for form, second in zip(forms, seconds, strict=True):
        measured.setdefault(form, []).append(float(np.log(second)))
    table = _FormTable(list(measured), cluster)
    means = np.array([np.mean(logs) for logs in measured.values()])
    found = table.fit(means)
    for _ in range(ROUNDS):
        if not add_longer_paths((form, found.logs) for form in measured):
            break
        found = table.fit(means)
    return found


def add_longer_paths(forms: Iterable[tuple[PathForm, Floats]]) -> bool:
    """Add the critical path of each form whose known ones are too short under its constants; True if one was."""
    short = [(form, logs) for form, logs in forms if form.simulated(logs) > (1 + NEAR) * form.seconds(logs)]
    for form, logs in short:
        form.add_path(logs)
    return bool(short)


class _FormTable:
    """Forms of some jobs, and which constants each constrains."""

    def __init__(self, forms: Sequence[PathForm], cluster: Cluster) -> None:
        self.forms, self.keys, self.cluster = forms, forms[0].keys, cluster
        self.tells = np.array([[key not in untold_by(form.job, cluster) for key in self.keys] for form in forms])

    def fit(self, measured: Floats) -> FittedLogs:
        """Fit the constants that are on a known path; the others stay."""
        seen = np.flatnonzero((self.tells * [form.shares() for form in self.forms]).max(axis=0) > 0)
        prior = prior_of_constants([self.keys[place] for place in seen], self.cluster)

        def of_seen(free: Floats) -> tuple[Floats, Floats]:
            logs = np.zeros(len(self.keys))
            logs[seen] = free
            slopes = np.array([form.slopes(logs) for form in self.forms]) * self.tells
            return np.log([form.seconds(logs) for form in self.forms]), slopes[:, seen]

        found = most_likely(of_seen, measured, prior, _STEPS)
        logs, told = np.zeros(len(self.keys)), np.zeros(len(self.keys))
        logs[seen], told[seen] = found.logs, 1 - found.left**2 / np.diag(prior.covariance)
        return FittedLogs(logs, told)
