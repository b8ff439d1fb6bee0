"""Costs fitted by stage are those that a run was made with, and predict other cuts of its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.costs.costs import Costs
from treadle.ir.ops import LaneKind
from treadle.ir.steps import Steps
from treadle.ir.trace import MICROSECONDS, Trace
from treadle.lowering import LoweringOptions
from treadle.simulator.fitted_run import fit_run
from treadle.simulator.gaps import find_gaps, own_durations
from treadle.simulator.predict import Durations
from treadle.simulator.stage_fitting import fit_stages

MS = 1_000_000
MODEL = Costs(
    "made",
    MICROSECONDS,
    model={"layers": 16, "f": 160 * MS, "b": 320 * MS},
    ends={"embed_f": 2 * MS, "embed_b": 1 * MS, "head_f": 12 * MS, "head_b": 24 * MS},
    message={"send": 3 * MS},
)


def run(name: str, costs: Costs = MODEL, vpp: int | None = None) -> Steps:
    """Three steps of a predicted run."""
    program = treadle.lower(treadle.generate(name, pp=4, microbatches=8, vpp=vpp), costs)
    trace = treadle.simulate(program, costs)
    return Steps(program, (0, 1, 2), np.stack([trace.start] * 3), np.stack([trace.end] * 3))


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", None), ("interleaved", 2), ("gpipe", None), ("zb-v", None)])
def test_costs_of_a_model_are_found_again_in_any_cut(name: str, vpp: int | None) -> None:
    costs = MODEL
    if name == "zb-v":
        split = {"layers": 16, "f": 160 * MS, "i": 200 * MS, "w": 120 * MS}
        ends = {"embed_f": 2 * MS, "embed_b": 1 * MS, "head_f": 12 * MS, "head_b": 16 * MS, "head_w": 8 * MS}
        costs = replace(MODEL, model=split, ends=ends)
    found = fit_stages(run(name, costs, vpp))
    assert found.model == costs.model
    assert found.ends == costs.ends
    assert found.message == costs.message
    assert not found.cells


def test_costs_fitted_to_one_cut_predict_another() -> None:
    found = fit_stages(run("1f1b"))
    again = run("interleaved", found, 2)
    assert again.makespans[0] == run("interleaved", MODEL, 2).makespans[0]


def test_dense_layers_are_told_from_others() -> None:
    costs = replace(MODEL, model={**MODEL.model, "dense": 7}, dense={"f": 4 * MS, "b": 8 * MS})
    found = fit_stages(run("1f1b", costs))
    assert found.dense == costs.dense
    assert found.model == costs.model


def test_stages_of_unknown_blocks_get_factors() -> None:
    costs = Costs("made", MICROSECONDS, cells={"f": 10 * MS, "b": 20 * MS}, stage={2: {"factor": 1.5}})
    found = fit_stages(run("1f1b", costs))
    assert found.cells == costs.cells
    assert found.stage == {2: {"factor": 1.5, "stages": 4}}


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_stage_of_a_model_keeps_a_factor_of_its_cut(slow: int) -> None:
    costs = replace(MODEL, ends={}, stage={slow: {"factor": 1.5}})
    found = fit_stages(run("1f1b", costs))
    assert found.model == costs.model
    assert found.stage == {slow: {"factor": 1.5, "stages": 4}}
    assert run("1f1b", found).makespans[0] == run("1f1b", costs).makespans[0]
    with pytest.raises(ValueError, match=f"stage.{slow}. of a cut into 4 stages, and the schedule has 8"):
        run("interleaved", found, 2)


def test_a_slow_first_stage_is_no_embedding() -> None:
    blocks = ("Etttt", "tttt", "tttt", "ttttL")
    found = fit_run(run("1f1b", replace(MODEL, ends={}, stage={0: {"factor": 1.5}})), blocks)
    assert (found.costs.ends, found.predicted) == ({}, found.measured)
    assert found.costs.stage == {0: {"factor": 1.5, "stages": 4}}
    real = fit_run(run("1f1b", replace(MODEL, ends={"embed_f": 4 * MS, "embed_b": 2 * MS})), blocks)
    assert (real.costs.ends, real.costs.stage) == ({"embed_f": 4 * MS, "embed_b": 2 * MS}, {})


def test_a_slow_last_stage_is_a_head_that_a_note_is_about() -> None:
    blocks = ("Etttt", "tttt", "tttt", "ttttL")
    slow = fit_run(run("1f1b", replace(MODEL, ends={}, stage={3: {"factor": 1.5}})), blocks)
    assert slow.costs.ends == {"head_f": 20 * MS, "head_b": 40 * MS}
    assert slow.of_head.startswith("what the last stage takes longer counts as its head, 2.0 layers' time; to tell")
    assert not fit_run(run("1f1b", replace(MODEL, ends={"head_f": 2 * MS, "head_b": 4 * MS})), blocks).of_head


def test_stages_that_vary_by_chance_bind_a_model_to_no_cut() -> None:
    costs = replace(MODEL, stage={1: {"factor": 1.03}, 2: {"factor": 0.98}})
    assert not fit_stages(run("1f1b", costs)).stage


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_unequal_microbatches_are_kept(name: str) -> None:
    factors = (1.0, 1.0, 2.5, 1.0, 1.0, 0.5, 1.0, 1.0)
    costs = Costs(
        "made", MICROSECONDS, cells={"f": 10 * MS, "i": 12 * MS, "w": 8 * MS}, microbatch={"factors": factors}
    )
    found = fit_stages(run(name, costs))
    assert found.microbatch == {"factors": pytest.approx(factors, rel=0.01)}
    assert run(name, found).makespans[0] == pytest.approx(run(name, costs).makespans[0], rel=0.01)


def test_gaps_between_ops_are_found_and_counted_with_the_ops_behind_them() -> None:
    gap = 2 * MS
    program = run("1f1b").program
    computes = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    took = np.where(computes, 10 * MS + gap, 3 * MS)
    trace = treadle.simulate(program, Durations(took))
    measured = Steps.of(Trace(program, np.where(computes, trace.start + gap, trace.start), trace.end, measured=True))
    found = find_gaps(measured)
    assert set(found.gap.tolist()) == {gap}
    assert found.message == 3 * MS
    replayed = treadle.simulate(program, Durations(own_durations(measured)[0]))
    assert abs(replayed.makespan / trace.makespan - 1) < 1e-3


def test_blocks_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="for each of 4 stages, got 2"):
        fit_stages(run("1f1b"), ("Et", "tL"))


def test_steps_at_the_grain_of_layers_are_refused() -> None:
    unit = treadle.load_costs("unit")
    schedule = treadle.generate("1f1b", pp=2, microbatches=2)
    program = treadle.lower(schedule, unit, options=LoweringOptions(by_layer=True, moe=False, layers=1))
    with pytest.raises(ValueError, match="'fit' makes costs of them"):
        fit_stages(Steps.of(treadle.simulate(program, unit)))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize(
    "more", [{"stage": {1: {"factor": 1.4}}}, {"microbatch": {"factors": (1, 1, 3, 1, 1, 1, 1, 1)}}]
)
def test_one_fit_predicts_its_run_again(name: str, more: dict[str, Any]) -> None:
    cells = {"f": 10 * MS, "i": 12 * MS, "w": 8 * MS}
    steps = run(name, Costs("made", MICROSECONDS, cells=cells, message={"send": MS}, **more))
    fitted = fit_run(steps)
    assert abs(fitted.error) < 0.01
    assert fitted.predicted == run(name, fitted.costs).makespans[0]


def test_a_fit_that_does_not_predict_its_run_says_by_how_much() -> None:
    steps = run("1f1b")
    last = np.arange(steps.program.num_ops) == steps.end[0].argmax()
    fitted = fit_run(replace(steps, end=steps.end + steps.makespans[0] * last))  # one long op of one stage
    assert fitted.error < -0.05
    assert f"{-fitted.error:.1%} too short" in fitted.in_words
    assert fit_run(steps).in_words == ""
