"""Estimates corrected by measured runs: constants fitted to them, and what is left over, told by the nearest runs.

    calibration = Calibration.fit(runs)
    calibration.seconds(job, software="26.06")
    calibration.nearest(job)

What the closed form does not explain of a run is shared by runs that are like it: of the same model, with the same
flags, on the same GPU, of the same release, and so on. Each such likeness is a level; two runs share the residue of
every level on which they are equal. All levels are taken to be equally wide (5 %), measurements to scatter by 2 %. The
correction of a job is the expected residue given those of all runs: a Gaussian process, or a mixed-effects model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import eq

import numpy as np

from treadle.estimate.constants import MeasuredRun, TermTable, efficiency_of, fit_logs
from treadle.estimate.job import Job
from treadle.estimate.log_fit import Floats

LEVEL = 0.05
"""Standard deviation of the residue that runs share on one level."""

SCATTER = 0.02
"""Standard deviation of a measurement, repeated."""


def configuration(run: MeasuredRun) -> tuple[object, ...]:
    """Return what tells configurations apart: model, GPUs, precision, batch and cuts; not flags, not the software."""
    job = run.job
    sizes = (job.global_batch_size, job.micro_batch_size, job.seq_len)
    return (job.model.name, run.gpu, job.cluster.num_gpus, job.precision, *sizes, *_cuts(job))


def _cuts(job: Job) -> tuple[int, ...]:
    return job.tp, job.cp, job.pp, job.vpp, job.ep


def _flags(run: MeasuredRun) -> tuple[object, ...]:
    return run.job.cuda_graph, run.job.a2a_overlap, "router graphs" in run.flags


def _kind(run: MeasuredRun) -> bool:
    return run.job.model.is_moe


LEVELS: dict[str, Callable[[MeasuredRun], object]] = {
    "model": lambda run: run.job.model.name,
    "model and flags": lambda run: (run.job.model.name, _flags(run)),
    "model, GPU and precision": lambda run: (run.job.model.name, run.gpu, run.job.precision),
    "kind and flags": lambda run: (_kind(run), _flags(run)),
    "kind, GPU and precision": lambda run: (_kind(run), run.gpu, run.job.precision),
    "kind and software": lambda run: (_kind(run), run.software),
    "configuration": configuration,
    "configuration and flags": lambda run: (configuration(run), run.job.recompute, _flags(run), run.flags),
}
"""Where two runs are equal, they share a residue. A kind is dense or with experts."""


@dataclass(frozen=True)
class Calibration:
    """Constants and residues of some measured runs."""

    runs: tuple[MeasuredRun, ...]
    table: TermTable
    logs: Floats
    residues: Floats

    @classmethod
    def fit(cls, runs: Sequence[MeasuredRun]) -> Calibration:
        """Fit constants and residues to runs.

        Raises:
            ValueError: there is no run.

        """
        if not runs:
            raise ValueError("a calibration needs at least one measured run, got none")
        table, rows = TermTable(runs), np.arange(len(runs))
        measured = np.log([run.seconds for run in runs])
        logs = fit_logs(table, measured, rows)
        return cls(tuple(runs), table, logs, measured - table.log_seconds(logs, rows))

    def seconds(self, job: Job, *, software: str = "", flags: tuple[str, ...] = (), offload_layers: int = 0) -> float:
        """Return the seconds of a step, corrected by the runs that are like it."""
        return self.predict(MeasuredRun(job, 0.0, software, flags, offload_layers))

    def predict(self, run: MeasuredRun) -> float:
        """Return the seconds of a run; its own are not looked at."""
        return float(np.exp(self._log_form(run) + self._shared(run) @ self._weights))

    def uncorrected(self, run: MeasuredRun) -> float:
        """Return the seconds of a run by the fitted constants alone."""
        return float(np.exp(self._log_form(run)))

    def nearest(self, run: MeasuredRun, count: int = 3) -> list[tuple[MeasuredRun, float]]:
        """Return the runs that say most about this one, each with the share of its residue that is expected here."""
        influence = np.linalg.solve(self._covariance, self._shared(run))
        order = np.argsort(-np.abs(influence))[:count]
        return [(self.runs[index], float(influence[index])) for index in order]

    def efficiency(self, gpu: str, precisions: Sequence[str] = ("bf16", "fp8", "mxfp8", "nvfp4")) -> dict[str, float]:
        """Return the constants of a GPU, as a cluster's [efficiency] section has them."""
        named = {name: float(value) for name, value in zip(self.table.factors, self.logs, strict=True)}
        return efficiency_of(named, gpu, precisions)

    def _log_form(self, run: MeasuredRun) -> float:
        table = TermTable([run], self.table.factors)
        return float(table.log_seconds(self.logs, np.arange(1))[0])

    def _shared(self, run: MeasuredRun) -> Floats:
        """Covariance of a run's residue with each of the fitted runs'."""
        levels = [key(run) for key in LEVELS.values()]
        return np.array([LEVEL**2 * sum(map(eq, levels, of_run)) for of_run in self._keys])

    @cached_property
    def _keys(self) -> list[list[object]]:
        return [[key(run) for key in LEVELS.values()] for run in self.runs]

    @cached_property
    def _covariance(self) -> Floats:
        shared = SCATTER**2 * np.eye(len(self.runs))
        for level in zip(*self._keys, strict=True):
            numbers = {key: number for number, key in enumerate(dict.fromkeys(level))}
            coded = np.array([numbers[key] for key in level])
            shared += LEVEL**2 * (coded[:, None] == coded)
        return shared

    @cached_property
    def _weights(self) -> Floats:
        return np.asarray(np.linalg.solve(self._covariance, self.residues))
