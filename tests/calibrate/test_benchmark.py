"""The benchmark on published runs: a GPU that nobody has measured, fitted to some of its runs."""

from __future__ import annotations

import statistics

import pytest

import calibrate as benchmark
from treadle.calibrate.constants_of_job import constants_of
from treadle.estimate import load_cluster
from treadle.estimate.calibration import configuration


def test_runs_are_those_that_a_plan_could_have() -> None:
    counts = {gpu: len(benchmark.planned_runs(gpu)) for gpu in benchmark.GPUS}
    assert counts == {"h100": 19, "b200": 12, "b300": 16, "gb200": 49, "gb300": 52}
    overlapped = [run for run in benchmark.planned_runs("gb200") if run.job.a2a_overlap and run.job.vpp > 1]
    assert {benchmark.planned_job(run, {}).schedule for run in overlapped} == {"interleaved-overlap"}


def test_constants_before_know_nothing_of_the_gpu() -> None:
    """Its own runs do not matter to them; they are not those of its preset."""
    before = benchmark.constants_before("b300", "others")
    assert before["gemm_mxfp8"] != pytest.approx(load_cluster("b300").efficiency["gemm_mxfp8"], rel=0.02)
    assert benchmark.constants_before("b300", "defaults") == {}


@pytest.mark.slow
def test_three_runs_of_a_b200_bring_the_defaults_nearer() -> None:
    found = benchmark.study("b200", "defaults", 5)[3]
    before, after = (statistics.median(getattr(each, name) for each in found) for name in ("before", "after"))
    assert after < 0.8 * before
    jobs = {configuration(run) for run in benchmark.planned_runs("b200")}
    assert len(jobs) == 6
    assert constants_of(benchmark.planned_runs("b200")[0].job)
