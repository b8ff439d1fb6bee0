"""How far printed steps are off for published runs like a job: the interval that a plan prints beside a step.

The errors are of runs that the constants were not fitted to: each configuration was left out in turn, and for GPUs
without published runs each chip. `presets/run_errors.toml` has them; `python benchmarks/fit_presets.py` writes it.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from treadle.estimate import Job

FEWEST = 10
"""Runs that a class of runs has at least."""

_INSIDE = 0.8
"""Share of the runs whose measured step is inside the printed interval."""


class RunErrors(NamedTuple):
    """Errors of printed steps, for published runs like a job."""

    low: float
    """The measured step is `low` to `high` times the printed one for 80 % of the runs."""

    high: float
    typical: float
    """Median of the absolute errors, as a share."""

    runs: int
    like: str
    """The class of the runs: MoE on h100 in fp8."""

    pair: float
    """Median error of the ratio of two steps, over pairs of configurations of one model on the same GPUs: errors that
    both have cancel. Jobs that are nearer to each other cannot be ranked."""


class _ClassErrors(NamedTuple):
    gpu: str
    precision: str
    moe: bool
    configuration_left_out: tuple[float, ...]
    chip_left_out: tuple[float, ...]


def run_errors(job: Job) -> RunErrors:
    """Return the errors of published runs like a job: of its kind and GPU in its precision, or the nearest that are.

    Example:
        >>> from treadle.estimate import Job, load_cluster, load_model
        >>> job = Job(load_model("llama3-70b"), load_cluster("h100:64"), global_batch_size=64, precision="fp8")
        >>> run_errors(job).like
        'dense on h100 in fp8'

    """
    return _errors(job.model.is_moe, job.cluster.gpu, job.precision)


@cache
def _errors(moe: bool, gpu: str, precision: str) -> RunErrors:
    kind = "MoE" if moe else "dense"
    levels: tuple[tuple[str, Callable[[_ClassErrors], bool], str], ...] = (
        (f"{kind} on {gpu} in {precision}", lambda each: (each.gpu, each.precision) == (gpu, precision), ""),
        (f"{kind} on {gpu} in any precision", lambda each: each.gpu == gpu, ""),
        (f"{kind} on GPUs whose chip the fit had not seen", lambda each: True, "chip"),
    )
    for like, alike, without in levels:
        classes = [each for each in _classes() if each.moe == moe and alike(each)]
        found = [
            error
            for each in classes
            for error in (each.chip_left_out if without == "chip" else each.configuration_left_out)
        ]
        if len(found) >= FEWEST:
            return _summary(found, like)
    raise AssertionError("the last level has all runs")


def _summary(errors: Sequence[float], like: str) -> RunErrors:
    factors = sorted(1 / (1 + error) for error in errors)
    outside = (1 - _INSIDE) / 2
    low, high = (factors[round(share * (len(factors) - 1))] for share in (outside, 1 - outside))
    typical = statistics.median(map(abs, errors))
    return RunErrors(min(1.0, low), max(1.0, high), typical, len(errors), like, _file()["pair_error"])


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("treadle.estimate").joinpath("presets", "run_errors.toml").read_text(encoding="utf-8"))


@cache
def _classes() -> tuple[_ClassErrors, ...]:
    return tuple(
        _ClassErrors(
            each["gpu"],
            each["precision"],
            each["moe"],
            tuple(each["configuration_left_out"]),
            tuple(each["chip_left_out"]),
        )
        for each in _file()["runs"]
    )
