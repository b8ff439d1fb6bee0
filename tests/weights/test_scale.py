"""Weight updates at scale, on paper: the figures of benchmarks/weights_scale.py and of docs/weights_plan.md."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import ROOT
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_rates import Rates

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scale() -> Iterator[Any]:
    """The benchmark as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("weights_scale")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_four_published_rows_are_predicted_from_two(scale: Any) -> None:
    found = scale.fit(scale.FITTED, "constant")
    assert found.broadcast_gb_s == pytest.approx(75.0, abs=0.1)
    assert found.second == pytest.approx(0.644, abs=0.001)
    assert {scale.SHORT[i]: round(error, 3) for i, error in found.errors.items()} == {
        "Qwen3": 0.111,
        "DS-16": -0.047,
        "DS-256": -0.143,
        "K2-256": -0.105,
    }
    for row in scale.ROWS:
        assert abs(scale.seconds(scale.program_of(row), scale.fitted_rates()) / row.seconds - 1) < 0.15


def test_the_simulator_says_what_a_closed_form_says(scale: Any) -> None:
    """One H2D buffer: a round's copy, its broadcasts, and so on; the last reload."""
    rates = Rates(h2d=30e9, broadcast=75e9, reload=600e9, latency_s=0.001, start_s=0.5)
    for row in scale.ROWS:
        each = row.size_gb * 1e9 / row.devices
        bucket = min(each, row.bucket_gib * 2**30)
        rounds = -int(-each // bucket)
        last = each - (rounds - 1) * bucket
        sent = row.size_gb * 1e9 / 75e9 + row.devices * rounds * 0.001
        wanted = 0.5 + each / 30e9 + sent + last / 600e9
        assert scale.seconds(scale.program_of(row), rates) == pytest.approx(wanted, rel=1e-6)


def test_no_other_pair_of_rows_does_as_well(scale: Any) -> None:
    fits = dict(scale.fits("constant"))
    assert len(fits) == 15
    same_model = {rows for rows, found in fits.items() if found is None}
    assert {tuple(scale.SHORT[i] for i in rows) for rows in same_model} == {("DS-16", "DS-256"), ("K2-16", "K2-256")}
    best = min((found for found in fits.values() if found is not None), key=lambda found: found.worst)
    assert best.rows == scale.FITTED
    assert best.worst == pytest.approx(0.143, abs=0.001)


def test_the_bandwidth_of_copies_cannot_be_told(scale: Any) -> None:
    """Rows on as many devices are no help, and of the others few give a bandwidth above zero, far off all of them."""
    fits = dict(scale.fits("h2d"))
    for rows, found in fits.items():
        as_many = scale.ROWS[rows[0]].devices == scale.ROWS[rows[1]].devices
        assert (found is None) == as_many
    sound = [found for found in fits.values() if found is not None and found.second > 0]
    assert {tuple(scale.SHORT[i] for i in found.rows) for found in sound} == {
        ("GLM", "DS-16"),
        ("GLM", "K2-16"),
        ("GLM", "K2-256"),
    }
    assert [round(found.worst, 3) for found in sound] == [0.237, 0.298, 0.237]


def test_what_256_devices_leave_over_is_one_latency(scale: Any) -> None:
    assert [round(hop * 1e6, 1) for hop in scale.latency_per_device()] == [24.7, 25.6]


LARGE = {
    0: {
        (16, 0, 1): (35.0, 64.6),
        (16, 0, 2): (17.9, 32.8),
        (16, 1, 1): (15.7, 24.4),
        (16, 1, 2): (15.6, 23.8),
        (16, 2, 2): (14.5, 21.4),
    },
    1: {
        (120, 0, 1): (35.0, 64.2),
        (120, 0, 2): (17.9, 32.6),
        (120, 1, 1): (14.6, 21.7),
        (120, 1, 2): (14.5, 21.0),
        (120, 2, 2): (14.5, 21.0),
    },
}
"""By column of the benchmark: sources and buffers, and the least and most seconds."""


@pytest.mark.parametrize("column", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_trillion_parameters_to_2048_devices(scale: Any, column: int) -> None:
    table = scale.large_table(scale.COLUMNS[column : column + 1])
    rounded = {(key[0], *key[2:]): tuple(round(took, 1) for took in ends) for key, ends in table.items()}
    assert rounded == LARGE[column]
    assert [round(took, 2) for took in scale.limits().values()] == [2.57, 20.58, 1.29]
    assert verify_update(lower_update(scale.large_stream(*scale.COLUMNS[column], 2, 2))).clean


@pytest.mark.parametrize(("chained", "limit_s"), [(False, 2.57), (True, 1.29)])
def test_a_chain_takes_a_piece_from_its_source_once(scale: Any, chained: bool, limit_s: float) -> None:
    """32 trainers, four replicas: a trainer sends four copies, or one, and a device receives a sixteenth."""
    stream = scale.routed_stream(32, chained=chained, replicas=4)
    assert round(scale.routed_limit(stream), 2) == limit_s
    program = lower_update(stream)
    assert verify_update(program).clean
    assert scale.routed_seconds(program, Rates(broadcast=50e9)) < 2.5 * limit_s


def test_the_model_has_its_published_size() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        tensors = importlib.import_module("weights_model").kimi_k2()
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert round(sum(tensor.size_bytes for tensor in tensors) / 1e9) == 1029
    assert len(tensors) == 139_339


def test_the_page_of_the_docs_has_these_figures(scale: Any) -> None:
    text = (ROOT / "docs" / "weights_plan.md").read_text(encoding="utf-8")
    rates = scale.fitted_rates()
    for i, row in enumerate(scale.ROWS):
        took = scale.seconds(scale.program_of(row), rates)
        error = "fitted" if i in scale.FITTED else f"{took / row.seconds - 1:+.1%}".replace("%", " %")
        rounds = int(scale.program_of(row).mb.max()) + 1
        assert f"| {row.name} | {row.size_gb} | {rounds} | {row.seconds:.2f} | {took:.2f} | {error} |" in text
    others = [found for rows, found in scale.fits("constant") if found is not None and rows != scale.FITTED]
    worst = [found.worst * 100 for found in others if found.second > 0]
    assert f"is {min(worst):.0f} to {max(worst):.0f} %" in " ".join(text.split())
    assert sum(found.second < 0 for found in others) == 6
