"""Constants fitted to runs: what was put in is found, what runs do not show stays, and one run does not run away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.calibrate.jobs import dense_jobs, h100, make_job, measure, measure_all, on
from treadle.calibrate import calibrate
from treadle.calibrate.calibration import planned
from treadle.calibrate.constants_of_job import base_of, constants_of, slower, value_of
from treadle.calibrate.path_form import PathForm
from treadle.calibrate.prior import BOUNDS, bounds
from treadle.estimate import Job

MOE: dict[str, Any] = {"model": "qwen3-30b-a3b", "ep": 8}
TRUE = {"gemm_bf16": 0.55, "memory": 0.55, "tp": 0.9, "attention": 0.4}


def noise(number: int, share: float = 0.02) -> list[float]:
    return [float(each) for each in np.exp(np.random.default_rng(7).normal(0, share, number))]


@pytest.mark.slow
def test_constants_put_in_are_found_again() -> None:
    before, truth = h100(), h100(constants=TRUE)
    jobs = dense_jobs(before)
    found = calibrate(before, measure_all(jobs, truth, noise(len(jobs))))
    moved = {name: np.log(value_of(found.cluster, name) / value_of(before, name)) for name in TRUE}
    share = {name: moved[name] / np.log(value / value_of(before, name)) for name, value in TRUE.items()}
    assert share["gemm_bf16"] == pytest.approx(1, abs=0.25)
    assert all(0.35 < each < 1.35 for each in share.values()), share  # the rest is the prior's
    assert (found.median("before") or 0) > 0.2
    assert (found.median("after") or 1) < 0.03
    assert (found.median("left_out") or 1) < 0.03
    assert not any(each.suspicious for each in found.runs)


@pytest.mark.slow
def test_other_jobs_are_predicted_from_a_few() -> None:
    before, truth = h100(), h100(constants={**TRUE, "grouped_bf16": 0.3, "launch_us_partial": 80.0})
    jobs = [make_job(before, **MOE, pp=pp, seq_len=seq) for pp in (1, 2) for seq in (2048, 8192)]
    found = calibrate(before, measure_all(jobs, truth, noise(len(jobs))))
    other = make_job(before, model="qwen3-30b-a3b", ep=4, pp=4, seq_len=4096)
    true, guessed, fitted = (planned(on(cluster, other)).step_s for cluster in (truth, before, found.cluster))
    assert abs(guessed / true - 1) > 0.1
    assert abs(fitted / true - 1) < 0.4 * abs(guessed / true - 1)


@pytest.mark.slow
def test_what_runs_do_not_see_stays_exactly() -> None:
    """A dense run inside a host says nothing of experts, of the host's link, nor of links between hosts."""
    before = h100(64)
    job = make_job(h100(8), tp=2, pp=2)
    found = calibrate(before, [measure(job, h100(constants=TRUE))])
    unseen = ("grouped_bf16", "grouped", "permute", "ep_nvlink", "ep_nic", "pcie", "cp", "pp", "dp", "dp_hidden",
              "gemm_fp8", "launch_us_none", "cast_fp8")  # fmt: skip
    for name in unseen:
        assert value_of(found.cluster, name) == value_of(before, name), name
        assert name not in {each.name for each in found.moved}
    for name in unseen:
        assert name in found.untold, name
    assert {"gemm_bf16", "memory", "tp"} <= {each.name for each in found.moved}


def test_links_inside_a_host_tell_a_cluster_of_one_host() -> None:
    found = calibrate(h100(8), [measure(make_job(h100(8), tp=2, pp=2), h100(constants=TRUE))])
    assert "pp" not in found.untold


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.8, 1.25, 2.0])
def test_one_run_moves_towards_it_and_not_past_it(factor: float) -> None:
    before = h100()
    found = calibrate(before, [measure(make_job(before, tp=2, pp=2), before, factor)])
    run = found.runs[0]
    assert min(run.before, run.seconds) < run.after < max(run.before, run.seconds)
    assert abs(run.error(run.after)) < 0.8 * abs(run.error(run.before))
    assert run.left_out is None
    assert found.median("left_out") is None
    for each in found.moved:
        shift = abs(np.log(each.after / each.before)) if not each.name.endswith("_hidden") else 0
        assert shift < abs(np.log(factor)), each.name


def test_a_run_as_estimated_moves_nothing() -> None:
    before = h100()
    found = calibrate(before, [measure(make_job(before, tp=2), before)])
    assert found.moved == ()
    assert found.cluster == before


@pytest.mark.slow
def test_many_runs_win_over_the_prior() -> None:
    before, jobs = h100(), dense_jobs(h100())
    few, many = (calibrate(before, measure_all(chosen, before, [2.0] * len(chosen))) for chosen in (jobs[:1], jobs))
    assert few.runs[0].error(few.runs[0].after) < -0.1
    assert (many.median("after") or 1) < 0.03


@pytest.mark.slow
def test_a_run_that_is_repeated_counts_once() -> None:
    before = h100()
    run, other = measure(make_job(before, tp=2), before, 1.5), measure(make_job(before, pp=2), before)
    once, often = (calibrate(before, [other, *[run] * count]) for count in (1, 9))
    assert often.cluster.efficiency == pytest.approx(once.cluster.efficiency)
    assert once.cluster != before
    assert often.runs[1].left_out == pytest.approx(planned(run.job).step_s)  # its repeats are left out with it


@pytest.mark.slow
def test_a_wild_run_is_pointed_out_and_bends_others_little() -> None:
    before, jobs = h100(), dense_jobs(h100())[:9]
    factors = [1.0] * 8 + [3.0]
    found = calibrate(before, measure_all(jobs, before, factors))
    assert [each.suspicious for each in found.runs] == [False] * 8 + [True]
    assert max(abs(each.error(each.after)) for each in found.runs[:8]) < 0.08


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measured run"):
        calibrate(h100(), [])


@pytest.mark.parametrize("factor", [1e-9, 0.1, 10, 1000])
def test_a_step_that_no_constants_explain_is_refused(factor: float) -> None:
    before = h100()
    wild = measure(make_job(before, tp=2), before, factor)
    with pytest.raises(ValueError, match=rf"line {wild.line}, {wild.name}: a step of .* within 8 times of their est"):
        calibrate(before, [wild])


class TestPathForm:
    def form(self, **given: Any) -> tuple[Job, PathForm]:
        job = make_job(h100(), **MOE, pp=2, vpp=2, schedule="interleaved-overlap", **given)
        return job, PathForm.of(job, sorted(constants_of(job)))

    def test_a_path_is_as_long_as_the_simulated_step(self) -> None:
        job, form = self.form()
        still = np.zeros(len(form.keys))
        assert form.seconds(still) == pytest.approx(planned(job).step_s, rel=1e-4)
        assert form.simulated(still) == pytest.approx(planned(job).step_s, rel=1e-9)

    @pytest.mark.slow
    def test_terms_are_exact_under_other_constants_and_never_too_long(self) -> None:
        _, form = self.form(recompute=("attn",))
        drawn = np.random.default_rng(3)
        for _ in range(8):
            logs = drawn.normal(0, 0.15, len(form.keys))
            said, simulated = form.seconds(logs), form.simulated(logs)
            assert said <= simulated * (1 + 1e-4)
            form.add_path(logs)
            assert form.seconds(logs) == pytest.approx(simulated, rel=1e-4)

    def test_slopes_are_those_of_the_simulator(self) -> None:
        dense = make_job(h100(), tp=2, pp=2)
        for form in (self.form()[1], PathForm.of(dense, sorted(constants_of(dense)))):
            still = np.zeros(len(form.keys))
            for place, key in enumerate(form.keys):
                moved = still.copy()
                moved[place] = 0.01
                slope = (np.log(form.simulated(moved)) - np.log(form.simulated(still))) / 0.01
                assert form.slopes(still)[place] == pytest.approx(slope, abs=0.01), key


@pytest.mark.parametrize("key", ["gemm_fp8", "latency_us", "launch_us_none", "dp_hidden"])
def test_a_constant_that_is_twice_as_slow_takes_twice_as_long(key: str) -> None:
    value = value_of(h100(), key)
    twice = slower(key, value, 2.0)
    shown = {"dp_hidden": (1 - twice) / (1 - value), "gemm_fp8": value / twice}.get(key, twice / value)
    assert shown == pytest.approx(min(2.0, 1 / (1 - value)) if key == "dp_hidden" else 2.0)


def test_what_is_hidden_is_never_less_than_nothing() -> None:
    assert slower("dp_hidden", 0.5, 5.0) == 0
    cluster = replace(h100(), efficiency={"dp_hidden": 1.0})
    assert value_of(cluster, "dp_hidden") == 1
    assert [end.tolist() for end in bounds(["dp_hidden"], cluster)] == [[0.0], [0.0]]


def test_constants_stay_within_what_is_possible() -> None:
    before = h100(constants={"gemm_bf16": 0.9})
    jobs = dense_jobs(before)[:4]
    found = calibrate(before, measure_all(jobs, before, [0.5] * len(jobs)))
    assert value_of(found.cluster, "gemm_bf16") == pytest.approx(BOUNDS["gemm"][1])
    for name, value in found.cluster.efficiency.items():
        least, most = BOUNDS[base_of(name)]
        assert least * 0.999 <= value <= most * 1.001, name
