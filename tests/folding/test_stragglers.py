"""A study's steps are those of the whole mesh, draw by draw, under every schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import treadle
from treadle.costs import load_costs
from treadle.folding.folding import fold
from treadle.folding.stragglers import straggler_study
from treadle.lowering import LoweringOptions, lower
from treadle.simulator import Stragglers, simulate
from treadle.simulator.slowness import random_factors

COSTS = replace(
    load_costs("deepseek-v3-h800"), step={"clip": 5_000_001, "optimizer": 70_000_000, "gather_params": 30_000_000}
)
NAMES = ("1f1b", "dualpipe", "interleaved-overlap")


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("stragglers", [Stragglers(0.02, 1.2), Stragglers(0.2, 1.7), Stragglers(0.0, 2.0)])
def test_steps_of_a_study_are_those_of_the_whole_mesh(stragglers: Stragglers, moe: bool) -> None:
    options = LoweringOptions(layers=1, moe=moe, ep=4 if moe else 1, dp=6, hold=False, early=False)
    schedules = {name: treadle.generate(name, pp=4, microbatches=8) for name in NAMES}
    pipelines = {name: lower(schedule, COSTS, options) for name, schedule in schedules.items()}
    study = straggler_study(pipelines, COSTS, ep=options.ep, dp=6, stragglers=stragglers, draws=6, seed=7)
    for row in study.rows:
        whole = lower(schedules[row.name], COSTS, replace(options, every_gpu=True))
        assert row.base == simulate(whole, COSTS).makespan
        for draw, makespan in enumerate(row.makespans):
            factors = stragglers.factors(whole.num_ranks, (7, draw))
            assert makespan == simulate(whole, COSTS, slowness=factors).makespan
            assert makespan == fold(pipelines[row.name], COSTS, ep=options.ep, dp=6, slowness=factors).makespan


def test_a_rank_of_several_gpus_is_slow_if_any_of_them_is() -> None:
    options = LoweringOptions(layers=1, ep=2, dp=3, hold=False, early=False, moe=True)
    schedule, stragglers = treadle.generate("1f1b", pp=4, microbatches=8), Stragglers(0.05, 1.5)
    pipelines = {"1f1b": lower(schedule, COSTS, options)}
    study = straggler_study(pipelines, COSTS, ep=2, dp=3, gpus_per_rank=8, stragglers=stragglers, draws=6)
    assert (study.num_ranks, study.stragglers) == (4 * 6 * 8, stragglers)
    whole = lower(schedule, COSTS, replace(options, every_gpu=True))
    for draw, makespan in enumerate(study.rows[0].makespans):
        gpus = stragglers.factors(4 * 6 * 8, (0, draw))
        assert (gpus > 1).sum() == 10
        assert makespan == simulate(whole, COSTS, slowness=gpus.reshape(-1, 8).max(1)).makespan


def test_a_study_says_which_schedule_suffers_least_and_which_is_fastest() -> None:
    options = LoweringOptions(layers=1, ep=2, dp=4, moe=True)
    pipelines = {
        name: lower(treadle.generate(name, pp=4, microbatches=8), COSTS, options) for name in ("gpipe", "dualpipev")
    }
    told: list[tuple[int, int]] = []
    study = straggler_study(
        pipelines, COSTS, ep=2, dp=4, stragglers=Stragglers(0.05, 1.5), draws=9, progress=lambda *at: told.append(at)
    )
    assert [row.name for row in study.rows] == ["gpipe", "dualpipev"]
    slowdowns = {row.name: [makespan / row.base - 1 for makespan in row.makespans] for row in study.rows}
    assert study.least_slowed.name == min(slowdowns, key=lambda name: float(np.median(slowdowns[name])))
    assert study.fastest.name == min(study.rows, key=lambda row: sorted(row.makespans)[4]).name
    row = study.as_dict()["rows"][0]
    assert row["max"] == pytest.approx(max(slowdowns["gpipe"]))
    assert row["p50"] == pytest.approx(sorted(slowdowns["gpipe"])[4])
    assert row["p10"] <= row["p50"] <= row["p90"] <= row["max"]
    assert row["step_s"] == pytest.approx(study.rows[0].base / 1e9)
    assert row["median_s"] == pytest.approx(row["step_s"] * (1 + row["p50"]))
    assert told == [(number, told[-1][1]) for number in range(1, told[-1][1] + 1)]


def test_studies_that_cannot_be_made_are_refused() -> None:
    one = lower(treadle.generate("1f1b", pp=2, microbatches=4), COSTS, LoweringOptions(layers=1, ep=2, moe=True))
    other = lower(treadle.generate("1f1b", pp=4, microbatches=4), COSTS, LoweringOptions(layers=1, ep=2, moe=True))
    with pytest.raises(ValueError, match="the same number of ranks, got 200 draws and ranks a 2, b 4"):
        straggler_study({"a": one, "b": other}, COSTS, ep=2, dp=1)
    with pytest.raises(ValueError, match="got 0 draws"):
        straggler_study({"a": one}, COSTS, ep=2, dp=1, draws=0)
    with pytest.raises(ValueError, match="ranks of none"):
        straggler_study({}, COSTS, ep=2, dp=1)


@pytest.mark.parametrize(
    ("share", "factor", "told"), [(1.5, 1.2, "from 0 to 1"), (-0.1, 1.2, "from 0 to 1"), (0.1, 0.9, "a factor from 1")]
)
def test_stragglers_out_of_range_are_refused(share: float, factor: float, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Stragglers(share, factor)


def test_a_draw_has_the_share_of_ranks_and_at_least_one() -> None:
    assert np.count_nonzero(Stragglers(0.001, 1.2).factors(131_072, 0) == 1.2) == 131
    assert np.count_nonzero(Stragglers(0.001, 1.2).factors(16, 0) == 1.2) == 1
    assert (Stragglers(0.0, 1.2).factors(16, 0) == 1).all()
    assert random_factors(1000, 0.1, 0).max() <= 1.1
