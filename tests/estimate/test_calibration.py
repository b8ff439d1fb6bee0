"""Constants and residues fitted to runs: what was put in is found again, and held-out figures stay as stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import accuracy
from held_to import bridge, mlperf
from held_to.runs import bridge_runs, mlperf_runs
from treadle.estimate import Job, estimate_step, load_cluster
from treadle.estimate.calibration import LEVELS, Calibration, configuration
from treadle.estimate.constants import MeasuredRun, TermTable, efficiency_of, fit_logs, prior_of
from treadle.estimate.efficiency import EFFICIENCY
from treadle.estimate.step_terms import step_terms
from treadle.estimate.step_time import ring_seconds


def dense_runs() -> list[MeasuredRun]:
    return [run for run in bridge_runs() if not run.job.model.is_moe and "fsdp" not in run.flags]


def by_priors(run: MeasuredRun) -> float:
    table = TermTable([run])
    logs = np.array([prior_of(name)[0] for name in table.factors])
    return float(np.exp(table.log_seconds(logs, np.arange(1))[0]))


@pytest.mark.parametrize("index", range(0, 156, 12))
def test_terms_add_up_to_the_closed_form(index: int) -> None:
    job = replace(bridge.runs()[index].job, a2a_overlap=False)
    dense = 0.0
    if job.sharding != "parameters":
        rank = estimate_step(job).slowest_rank
        dense = ring_seconds(job, _dense_parameters(job, rank))
    expected = estimate_step(job).seconds - dense
    assert by_priors(MeasuredRun(job, 1.0)) == pytest.approx(expected, rel=1e-6)


def _dense_parameters(job: Job, rank: int) -> float:
    from treadle.estimate.stages import rank_rows
    from treadle.estimate.step_time import job_times

    return sum(job_times(job).parameters[letter] for letter in "".join(rank_rows(job)[rank]))


def test_shipped_constants_give_what_was_fitted() -> None:
    """[efficiency] of a cluster, written and read, says what the calibration says without its residues."""
    calibration = Calibration.fit(bridge.runs())
    for run in (dense_runs()[0], bridge.runs()[0], bridge.runs()[-1]):
        precisions = (run.job.precision, "bf16")
        efficiency = {**calibration.efficiency(run.gpu, precisions), "ring_us": 1e-9}
        efficiency["gemm_bf16"] = efficiency["gemm"]  # the head has no factor of its own
        job = replace(run.job, cluster=replace(run.job.cluster, efficiency=efficiency))
        if "pp_hidden" in efficiency and run.offload_layers == 0:
            assert estimate_step(job).seconds == pytest.approx(calibration.uncorrected(run), rel=0.03)


def test_constants_put_in_are_found() -> None:
    runs = [run for run in dense_runs() if run.gpu == "gb200" and run.job.precision == "fp8"]
    runs += [run for run in dense_runs() if run.gpu == "h100"]
    table, rows = TermTable(runs), np.arange(len(runs))
    true = np.array([prior_of(name)[0] for name in table.factors])
    true[table.factors.index("gemm")] += 0.3
    made = table.log_seconds(true, rows)
    before = np.abs(made - table.log_seconds(np.array([prior_of(name)[0] for name in table.factors]), rows))
    logs = fit_logs(table, made, rows)
    left = np.abs(made - table.log_seconds(logs, rows))
    assert left.max() < 0.2 * before.max()
    assert logs[table.factors.index("gemm")] > true[table.factors.index("gemm")] - 0.25


def test_one_wild_run_hardly_moves_the_others() -> None:
    runs = dense_runs()
    wild = [replace(runs[0], seconds=5 * runs[0].seconds), *runs[1:]]
    plain, moved = (Calibration.fit(each) for each in (runs, wild))
    far = next(run for run in runs if run.gpu == "h100")
    assert moved.uncorrected(far) == pytest.approx(plain.uncorrected(far), rel=0.05)


def test_repeated_run_is_predicted_from_its_twin() -> None:
    runs = [run for run in bridge.runs() if run.software != "26.06"]
    twin = next(run for run in runs if run.job.model.name == "deepseek-v3" and run.gpu == "gb300")
    slower = [
        replace(run, seconds=1.3 * run.seconds) if configuration(run) == configuration(twin) else run for run in runs
    ]
    plain, changed = (Calibration.fit(each).predict(replace(twin, software="27.02")) for each in (runs, slower))
    assert changed / plain == pytest.approx(1.3, rel=0.08)
    nearest, share = Calibration.fit(runs).nearest(replace(twin, software="27.02"), 1)[0]
    assert configuration(nearest) == configuration(twin)
    assert 0 < share < 1


def test_prediction_does_not_look_at_its_own_seconds() -> None:
    calibration = Calibration.fit(dense_runs())
    run = mlperf_runs()[0]
    assert calibration.predict(run) == calibration.predict(replace(run, seconds=1e9))
    assert calibration.seconds(run.job, software=run.software) == calibration.predict(run)


def test_runs_of_other_kind_share_no_level() -> None:
    dense, moe = dense_runs()[0], next(run for run in bridge.runs() if run.job.model.is_moe)
    assert not any(key(dense) == key(moe) for key in LEVELS.values())


def test_calibration_of_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="at least one measured run"):
        Calibration.fit([])


def test_efficiency_of_priors_is_the_default() -> None:
    names = ("gemm", "memory", "latency_us", "step_us", "dp_hidden", "ep_hidden", "launch_hidden", "optimizer")
    found = efficiency_of({name: prior_of(name)[0] for name in names}, "h100", ())
    for name in names:
        assert found[name] == pytest.approx(EFFICIENCY[name][0]), name


def test_presets_have_the_constants_that_the_fit_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = accuracy.fit()
    capsys.readouterr()
    for gpu, constants in found.items():
        shipped = load_cluster(f"{gpu}:8").efficiency
        assert shipped.keys() == constants.keys()
        for name, value in constants.items():
            assert shipped[name] == pytest.approx(value, rel=0.01, abs=0.002), (gpu, name)


def test_terms_know_fsdp_and_offload() -> None:
    run = next(run for run in bridge_runs() if run.offload_layers)
    terms = step_terms(run.job, offload_layers=run.offload_layers)
    assert terms["fsdp"] > 0
    assert terms["pcie"] > 0
    assert terms["dp"] == 0
    assert step_terms(run.job)["pcie"] == 0


def test_all_rows_are_there() -> None:
    assert len(bridge.runs()) == 156
    assert len(mlperf_runs()) == 18


def test_ring_constant_is_the_fitted_one() -> None:
    _, ring = mlperf.fitted()
    assert 1e6 * ring == pytest.approx(EFFICIENCY["ring_us"][0], rel=0.01)


def test_mlperf_figures_are_kept() -> None:
    for name, figure in mlperf.run().items():
        assert accuracy.reached(name, figure), (name, figure)


@pytest.mark.slow
def test_bridge_figures_are_kept() -> None:
    found = bridge.run()
    for name, figure in found.items():
        assert accuracy.reached(name, figure), (name, figure)
    assert not [miss.row for miss in bridge.misses() if miss.cause == "not known"]
