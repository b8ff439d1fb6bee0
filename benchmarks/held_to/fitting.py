"""The constants of GPU presets, fitted to published runs through the step that `treadle plan` prints.

Every run counts. A constant is believed to be about the default; by `calibrate.prior.WIDTHS` it differs from it on all
GPUs and in all precisions together, in each precision, on each chip (B200 and GB200 have the same), and on each GPU, in
the parts of `PARTS`. Software ages: runs of older releases are slower by a factor of their release, of dense models and
of those with experts; the presets have the constants of the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from held_to.printed import Row
from treadle.calibrate.constants_of_job import base_of, constants_of, with_constants
from treadle.calibrate.fit import add_longer_paths
from treadle.calibrate.log_fit import Floats, LogPrior, most_likely
from treadle.calibrate.path_form import PathForm, constants_at
from treadle.calibrate.prior import WIDTHS, bounds
from treadle.estimate import Cluster, Job

PARTS = {"base": 0.5, "key": 0.25, "chip": 0.15, "gpu": 0.1}
"""Shares of a constant's variance that all GPUs and precisions have in common, that a precision has, a chip, a GPU."""

HOST_PARTS = {"base": 0.5, "key": 0.42, "chip": 0.04, "gpu": 0.04}
HOST = ("launch_us", "expert_us", "overlap_us")
"""Times of the host hardly differ by GPU."""

RELEASE_WIDTH = 0.05
MODEL_ERROR = 0.05
ROUNDS = 6
SETTLED = 2
NEWEST = "26.06"
"""Releases from this one on have no factor."""


def factor_of(run: Row) -> str:
    """Return the name of the factor of a run's release, or ""."""
    if not run.release or run.release >= NEWEST:
        return ""
    return f"{run.release[:5]} {run.kind}"


def chip_of(gpu: str) -> str:
    """Return the chip of a GPU: b200 of gb200, h100 of h800."""
    return {"h800": "h100", "h20": "h100"}.get(gpu, gpu.removeprefix("g"))


class ConstantPool:
    """Runs, and the logarithms that their steps depend on: constants of each GPU, and factors of releases."""

    def __init__(self, runs: Sequence[Row]) -> None:
        self.runs = tuple(runs)
        jobs = dict.fromkeys(run.job for run in runs)
        self.gpus = tuple(dict.fromkeys(job.cluster.gpu for job in jobs))
        self.keys = tuple(sorted({key for job in jobs for key in constants_of(job)}))
        self.factors = tuple(sorted({factor_of(run) for run in runs} - {""}))
        self._forms = {job: PathForm.of(plain(job), self.keys) for job in jobs}

    @property
    def size(self) -> int:
        """How many logarithms there are."""
        return len(self.gpus) * len(self.keys) + len(self.factors)

    def of_gpu(self, gpu: str) -> slice:
        """Return where a GPU's constants are."""
        first = self.gpus.index(gpu) * len(self.keys)
        return slice(first, first + len(self.keys))

    def _place(self, factor: str) -> int:
        return len(self.gpus) * len(self.keys) + self.factors.index(factor)

    def aged(self, run: Row, logs: Floats) -> float:
        """Return how many times as long as the newest release a run's release takes."""
        return float(np.exp(logs[self._place(factor_of(run))])) if factor_of(run) else 1.0

    @cached_property
    def prior(self) -> LogPrior:
        """What is believed before."""
        own = [(gpu, key) for gpu in self.gpus for key in self.keys]
        covariance = np.zeros((self.size, self.size))
        for one, (gpu, key) in enumerate(own):
            for two, (other, like) in enumerate(own):
                if base_of(key) != base_of(like):
                    continue
                parts = HOST_PARTS if base_of(key) in HOST else PARTS
                shared = parts["base"]
                if key == like:
                    shared += (
                        parts["key"] + parts["chip"] * (chip_of(gpu) == chip_of(other)) + parts["gpu"] * (gpu == other)
                    )
                covariance[one, two] = WIDTHS[base_of(key)] ** 2 * shared
        rest = range(len(own), self.size)
        covariance[rest, rest] = RELEASE_WIDTH**2
        covariance[np.diag_indices(self.size)] += 1e-6
        free = np.full(len(self.factors), np.inf)
        ends = bounds(self.keys, plain_cluster(self.runs[0].job.cluster))
        least, most = (
            np.concatenate([*[end] * len(self.gpus), sign * free]) for end, sign in zip(ends, (-1, 1), strict=True)
        )
        return LogPrior(np.zeros(self.size), covariance, least, most)

    def fit(self, runs: Iterable[Row] | None = None) -> Floats:
        """Return the most likely logarithms, given some of the runs."""
        chosen = tuple(runs) if runs is not None else self.runs
        measured = np.log([run.seconds for run in chosen])
        logs = most_likely(lambda at: self._times(chosen, at), measured, self.prior, 40, MODEL_ERROR).logs
        for _ in range(ROUNDS):
            jobs = dict.fromkeys(run.job for run in chosen)
            if not add_longer_paths((self._forms[job], logs[self.of_gpu(job.cluster.gpu)]) for job in jobs):
                break
            logs = most_likely(lambda at: self._times(chosen, at), measured, self.prior, 40, MODEL_ERROR).logs
        return logs

    def fit_all(self) -> Floats:
        """Return the most likely logarithms, given all runs; paths are known there, for fits to some of the runs."""
        logs = self.fit()
        for _ in range(SETTLED):
            for job, form in self._forms.items():
                form.restart(logs[self.of_gpu(job.cluster.gpu)])
            logs = self.fit()
        return logs

    def _times(self, runs: Sequence[Row], logs: Floats) -> tuple[Floats, Floats]:
        times, slopes = np.zeros(len(runs)), np.zeros((len(runs), self.size))
        for row, run in enumerate(runs):
            form, own = self._forms[run.job], self.of_gpu(run.job.cluster.gpu)
            times[row] = np.log(form.seconds(logs[own]))
            slopes[row, own] = form.slopes(logs[own])
            if factor_of(run):
                at = self._place(factor_of(run))
                times[row] += logs[at]
                slopes[row, at] = 1.0
        return times, slopes

    def constants(self, gpu: str, logs: Floats) -> Mapping[str, float]:
        """Return the constants of a GPU."""
        return constants_at(plain_cluster(self.runs[0].job.cluster), self.keys, logs[self.of_gpu(gpu)])

    def printed(self, job: Job, logs: Floats) -> Job:
        """Return a job with fitted constants: what `treadle plan` would print of it is of the newest release."""
        cluster = plain_cluster(job.cluster)
        return replace(
            job, cluster=with_constants(cluster, constants_at(cluster, self.keys, logs[self.of_gpu(cluster.gpu)]))
        )


def plain_cluster(cluster: Cluster) -> Cluster:
    """Return a cluster with the defaults of all constants."""
    return replace(cluster, efficiency={})


def plain(job: Job) -> Job:
    """Return a job with the defaults of all constants."""
    return replace(job, cluster=plain_cluster(job.cluster))
