"""How far printed steps are off for published runs like a job: the interval that a plan prints beside a step.

The errors are of typed commands, with constants that were not fitted to the run: its configuration was left out, and
for GPUs without published runs its chip. Runs of a kind with the same CUDA graphs count together on all GPUs: a GPU has
too few configurations of its own. `presets/run_errors.toml` has them; `python benchmarks/fit_presets.py` writes it.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from treadle.estimate import Job

FEWEST = 12
"""Configurations that a class of runs has at least: releases of one configuration err alike."""

INSIDE = 0.8
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
    """The class of the runs: MoE without CUDA graphs."""

    pair: float
    """Median error of the ratio of two steps, over pairs of configurations of one model on the same GPUs: errors that
    both have cancel. Jobs that are nearer to each other cannot be ranked."""

    on_gpu: bool = True
    """Some of the runs are on the job's GPU with its CUDA graphs."""


class _ClassErrors(NamedTuple):
    gpu: str
    moe: bool
    graphs: str
    configurations: int
    configuration_left_out: tuple[float, ...]
    chip_left_out: tuple[float, ...]


def run_errors(job: Job) -> RunErrors:
    """Return the errors of published runs like a job: of its kind with its CUDA graphs, or the nearest that are.

    Example:
        >>> from treadle.estimate import Job, load_cluster, load_model
        >>> job = Job(load_model("llama3-70b"), load_cluster("h100:64"), global_batch_size=64, precision="fp8")
        >>> run_errors(job).like
        'dense without CUDA graphs'

    """
    return _errors(job.model.is_moe, job.cluster.gpu, job.cuda_graph)


@cache
def _errors(moe: bool, gpu: str, graphs: str) -> RunErrors:
    kind, of_kind = "MoE" if moe else "dense", [each for each in _classes() if each.moe == moe]
    if not any(each.gpu == gpu for each in of_kind):
        errors = [error for each in of_kind for error in each.chip_left_out]
        return _summary(errors, f"{kind} on GPUs whose chip the fit had not seen", on_gpu=False)
    levels: tuple[tuple[str, Callable[[_ClassErrors], bool]], ...] = (
        (f"{kind} {graphs_text(graphs)}", lambda each: each.graphs == graphs),
        (f"{kind} with any CUDA graphs or none", lambda each: True),
    )
    for like, alike in levels:
        classes = [each for each in of_kind if alike(each)]
        if sum(each.configurations for each in classes) >= FEWEST:
            errors = [error for each in classes for error in each.configuration_left_out]
            return _summary(errors, like, on_gpu=any((each.gpu, each.graphs) == (gpu, graphs) for each in classes))
    raise AssertionError("the last level has all runs")


def graphs_text(graphs: str) -> str:
    """Return a job's CUDA graphs in words."""
    return "without CUDA graphs" if graphs == "none" else f"with {graphs} CUDA graphs"


def interval(errors: Sequence[float]) -> tuple[float, float]:
    """Return how many times the printed step one more run of a class takes, at least and at most, in 80 % of cases.

    It is wider than what holds 80 % of the class itself, the more so the fewer runs it has.
    """
    factors = sorted(1 / (1 + error) for error in errors)
    place = max(0, math.floor((1 - INSIDE) / 2 * (len(factors) + 1)) - 1)
    return min(1.0, factors[place]), max(1.0, factors[-1 - place])


def _summary(errors: Sequence[float], like: str, *, on_gpu: bool) -> RunErrors:
    typical = statistics.median(map(abs, errors))
    return RunErrors(*interval(errors), typical, len(errors), like, _file()["pair_error"], on_gpu)


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("treadle.estimate").joinpath("presets", "run_errors.toml").read_text(encoding="utf-8"))


@cache
def _classes() -> tuple[_ClassErrors, ...]:
    return tuple(
        _ClassErrors(
            each["gpu"],
            each["moe"],
            each["graphs"],
            each["configurations"],
            tuple(each["configuration_left_out"]),
            tuple(each["chip_left_out"]),
        )
        for each in _file()["runs"]
    )
