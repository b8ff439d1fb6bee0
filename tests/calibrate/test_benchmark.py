"""The benchmark on published runs: a GPU that nobody has measured, fitted to some of its runs."""

from __future__ import annotations

import statistics

import pytest

import calibrate as benchmark
from treadle.estimate import load_cluster


def test_runs_are_those_that_a_plan_could_have() -> None:
    counts = {gpu: len(benchmark.runs_of(gpu)) for gpu in benchmark.GPUS}
    assert counts == {"h100": 19, "b200": 12, "b300": 16, "gb200": 49, "gb300": 52}
    assert {run.job.schedule for run in benchmark.runs_of("gb200")} == {"1f1b", "interleaved", "interleaved-overlap"}


def test_constants_before_are_the_defaults() -> None:
    job = benchmark.unfitted(benchmark.runs_of("b300")[0].job)
    assert job.cluster.efficiency == {}
    assert job.cluster.peak_flops == load_cluster("b300").peak_flops


@pytest.mark.slow
def test_three_runs_of_a_b200_bring_the_defaults_nearer() -> None:
    found = benchmark.study("b200", 5)[3]
    before, after = (statistics.median(getattr(each, name) for each in found) for name in ("before", "after"))
    assert after < 0.8 * before
    assert len({benchmark.configuration(run) for run in benchmark.runs_of("b200")}) == 6
