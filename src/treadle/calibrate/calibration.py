"""The calibration: runs estimated before, constants fitted, runs estimated after and each with itself left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from treadle.calibrate.calibration_report import CalibrationReport, EstimatedRun, FittedConstant
from treadle.calibrate.constants_of_job import constants_of, value_of, with_constants
from treadle.calibrate.fit import FittedLogs, fit_paths
from treadle.calibrate.path_form import PathForm, constants_at
from treadle.calibrate.runs_file import MeasuredRun
from treadle.estimate import Cluster, Job
from treadle.estimate.efficiency import EFFICIENCY
from treadle.planner.find_plan import usable_bytes
from treadle.planner.job_estimate import JobEstimate, estimate_job

FEWEST_TO_LEAVE_OUT = 3
"""Runs from which on each is also estimated from the others."""

_DIGITS = 4
"""Significant digits of a fitted constant."""

Progress = Callable[[int, int], None]

MOST_OFF = 8
"""How many times the estimate, or a part of it, a measured step is that says anything about constants."""

T = TypeVar("T")


def calibrate(cluster: Cluster, runs: Sequence[MeasuredRun], *, progress: Progress | None = None) -> CalibrationReport:
    """Fit the constants of a cluster to measured runs.

    Args:
        cluster: its constants are what is believed before.
        runs: measured on GPUs of the cluster; `read_runs` reads them.
        progress: called with the estimates done, and all of them.

    Returns:
        The cluster with fitted constants, which constants moved, and the estimates of every run.

    Raises:
        ValueError: there is no run, or one is `MOST_OFF` times off its estimate.

    """
    if not runs:
        raise ValueError("constants are fitted to at least one measured run, got none")
    steps = _Steps(len(runs) * (3 if len(runs) >= FEWEST_TO_LEAVE_OUT else 2), progress)
    keys = tuple(sorted({key for each in runs for key in constants_of(each.job)}))
    forms = {job: PathForm(planned(job), keys) for job in steps.counted(each.job for each in runs)}
    _check_scale(runs)
    found = _fit(runs, forms, cluster)
    fitted = _with_logs(cluster, keys, found)
    estimated = []
    for each in steps.counted(runs):
        job = each.job
        after = planned(_on(fitted, job))
        others = [other for other in runs if other.job != job]
        left_out = None
        if others and len(runs) >= FEWEST_TO_LEAVE_OUT:
            left_out = planned(_on(_with_logs(cluster, keys, _fit(others, forms, cluster)), job)).step_s
            steps.count()
        over = max(0, after.memory_bytes - usable_bytes(cluster))
        estimated.append(EstimatedRun(each, planned(job).step_s, after.step_s, left_out, after.memory_bytes, over))
    return CalibrationReport(cluster, fitted, _constants(cluster, fitted, keys, found), tuple(estimated))


def _check_scale(runs: Sequence[MeasuredRun]) -> None:
    """Refuse a step in another unit, or of another job: no constants explain it."""
    for each in runs:
        expected = planned(each.job).step_s
        if not 1 / MOST_OFF < each.seconds / expected < MOST_OFF:
            raise ValueError(
                f"line {each.line}, {each.name}: a step of {each.seconds:.4g} s is estimated at {expected:.4g} s, and "
                f"measured steps are within {MOST_OFF} times of their estimate; write seconds a step, check the sizes "
                "of the job, or leave the row out"
            )


@lru_cache(maxsize=256)
def planned(job: Job) -> JobEstimate:
    """Return a job as `treadle plan` would show it: its step simulated whole, and its memory."""
    return estimate_job(job).simulated_whole()


class _Steps:
    """Reports how far the work is."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress

    def count(self) -> None:
        """Another estimate is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def counted(self, each: Iterable[T]) -> Iterator[T]:
        """Yield each, and count it when the next is asked for."""
        for one in each:
            yield one
            self.count()


def _on(cluster: Cluster, job: Job) -> Job:
    """Return a job with other constants of its cluster."""
    return replace(job, cluster=replace(cluster, num_gpus=job.cluster.num_gpus))


def _fit(runs: Sequence[MeasuredRun], forms: Mapping[Job, PathForm], cluster: Cluster) -> FittedLogs:
    return fit_paths([forms[each.job] for each in runs], [each.seconds for each in runs], cluster)


def _with_logs(cluster: Cluster, keys: Sequence[str], found: FittedLogs) -> Cluster:
    """Return a cluster with the constants that moved, as they are written."""
    new = {key: float(f"{value:.{_DIGITS}g}") for key, value in constants_at(cluster, keys, found.logs).items()}
    moved = {key: value for key, value in new.items() if value != float(f"{value_of(cluster, key):.{_DIGITS}g}")}
    return with_constants(cluster, moved)


def _constants(cluster: Cluster, fitted: Cluster, keys: Sequence[str], found: FittedLogs) -> tuple[FittedConstant, ...]:
    """Return all constants, those that the runs constrain most first."""
    told = {key: share for key, share in zip(keys, found.told.tolist(), strict=True) if share > 0}
    names = dict.fromkeys((*told, *cluster.efficiency, *EFFICIENCY))
    made = [
        FittedConstant(name, value_of(cluster, name), value_of(fitted, name), told.get(name, 0.0)) for name in names
    ]
    return tuple(sorted(made, key=lambda each: -each.told))
