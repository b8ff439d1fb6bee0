"""Published measurements, and what `treadle plan` prints beside them."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

from held_to import printed
from held_to.fitting import ConstantPool
from held_to.rows import Prediction, misses_of, read_rows, spread
from tests.support.command import treadle
from tests.support.paths import ROOT
from treadle.calibrate.calibration import planned


@pytest.mark.parametrize(("name", "number"), [("zero_bubble", 12), ("vtrain", 109), ("simumax", 43)])
def test_all_rows_are_there(name: str, number: int) -> None:
    assert len(read_rows(name)) == number


def test_errors_and_misses_of_predictions() -> None:
    rows = [Prediction("a", 100.0, 100.0), Prediction("b", 80.0, 100.0), Prediction("c", 130.0, 100.0)]
    assert spread(rows) == pytest.approx({"median": 0.2, "mean": 0.5 / 3, "p90": 0.3, "max": 0.3})
    found = misses_of(rows)
    assert [each.row for each in found] == ["c", "b"]
    assert [each.error for each in found] == pytest.approx([0.3, -0.2])


def test_rows_of_every_data_set() -> None:
    assert {name: len(rows) for name, rows in printed.data_sets().items()} == {
        "bridge_dense": 49,
        "bridge_dense_25": 22,
        "bridge_moe": 99,
        "bridge_fsdp": 14,
        "mlperf": 18,
        "simumax": 43,
        "zb_1f1b": 12,
        "zb_interleaved": 12,
        "vtrain": 109,
    }


@pytest.mark.slow
def test_figures_are_of_the_step_that_the_command_prints() -> None:
    """Of the first run that the search has: one stage, nothing recomputed."""
    rows = printed.data_sets()["bridge_moe"]
    row = next(row for row in rows if row.job.pp == 1 and not row.job.recompute and row.fits)
    job = row.job
    sizes = {"tp": job.tp, "cp": job.cp, "pp": job.pp, "ep": job.ep, "micro-batch-size": job.micro_batch_size}
    options = {
        **sizes,
        "model": job.model.name,
        "cluster": f"{job.cluster.gpu}:{job.cluster.num_gpus}",
        "precision": job.precision,
        "seq-len": job.seq_len,
        "tokens-per-batch": job.global_batch_size * job.seq_len,
        "cuda-graph": job.cuda_graph,
        "schedule": job.schedule,
        "gradients": "bf16",
        "sharding": job.sharding,
        "recompute": "no",
    }
    done = treadle("plan", *(word for name, value in options.items() for word in (f"--{name}", str(value))), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"]["step_s"] == pytest.approx(row.prediction.predicted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        ("bridge_fsdp", "FSDP, blind"),
        ("mlperf", "MLPerf 405B, blind"),
        ("zb_1f1b", "zero-bubble paper, 1F1B"),
        ("zb_interleaved", "zero-bubble paper, interleaved"),
    ],
)
def test_the_page_has_the_figures_of_what_plans_print(name: str, protocol: str) -> None:
    predictions = [row.prediction for row in printed.data_sets()[name]]
    found = spread(predictions) | {"bias": statistics.median(each.error for each in predictions)}
    shown = " | ".join(f"{100 * found[key]:.1f}" for key in ("median", "p90", "max", "bias"))
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert f"| {protocol} | dense | {len(predictions)} | {shown} |" in page


def test_regret_is_of_the_job_that_is_ranked_first() -> None:
    rows = printed.data_sets()["zb_1f1b"][:3]
    worst = [replace(row, seconds=row.seconds / factor) for row, factor in zip(rows, (1.0, 1.5, 3.0), strict=True)]
    assert all(regret >= 0 for regret in printed.regrets(worst).values())
    assert printed.regrets(rows[:1]) == {}


def test_constants_are_fitted_within_their_bounds_and_explain_a_slower_release() -> None:
    jobs = [row.job for row in printed.data_sets()["bridge_dense_25"][:3]]
    rows = [printed.Row("as printed", job, 1.3 * planned(job).step_s, "25.09") for job in jobs]
    pool = ConstantPool(rows)
    logs = pool.fit()
    assert np.all(logs >= pool.prior.least)
    assert np.all(logs <= pool.prior.most)
    assert pool.aged(rows[0], logs) > 1
    assert pool.factors == ("25.09 dense",)


def test_pairs_are_ranked_by_tokens() -> None:
    rows = printed.data_sets()["zb_1f1b"][:3]
    right, total = printed.ranked(rows, lambda row: row.job.pp)
    assert 0 < right <= total <= 3
    assert printed.ranked(rows, lambda row: row.name) == (0, 0)
