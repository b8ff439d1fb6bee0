"""Schedules that other packages register are searched as ours are, by what their Family says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.estimate import load_cluster, load_model
from treadle.planner import SearchSpace, find_plan
from treadle.planner.space import candidates, searched_schedules
from treadle.schedules import ENTRY_POINT, SCHEDULES, known

MODULE = """
from dataclasses import replace
from treadle.schedules import SCHEDULES

MINE = replace(SCHEDULES["zb-h1"], name="mine")
PAIRED = replace(SCHEDULES["dualpipev"], name="paired")
IDLE = replace(SCHEDULES["gpipe"], name="idle")
UNRUN = replace(SCHEDULES["zb-h1"], name="unrun", trainers=())
"""


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with four schedules."""
    (tmp_path / "registered_schedules.py").write_text(MODULE)
    about = tmp_path / "registered_schedules-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: registered-schedules\nVersion: 1.0\n")
    names = {"mine": "MINE", "paired": "PAIRED", "idle": "IDLE", "unrun": "UNRUN"}
    lines = [f"{name} = registered_schedules:{value}" for name, value in names.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    known.cache_clear()
    yield
    known.cache_clear()


@pytest.mark.usefixtures("registered")
def test_what_a_family_says_decides_for_which_models_it_is_searched() -> None:
    dense, moe = (set(searched_schedules(load_model(name))) for name in ("llama3-8b", "qwen3-30b-a3b"))
    assert {"mine", "zb-h1"} <= dense
    assert moe - dense == {"paired", "interleaved-overlap", "dualpipev"}
    assert {"idle", "gpipe", "unrun"}.isdisjoint(moe)


@pytest.mark.usefixtures("registered")
def test_a_schedule_that_no_public_trainer_runs_is_searched_where_it_is_named() -> None:
    space = SearchSpace(tp=(2,), pp=(2,), micro_batch_size=(1,), recompute=((),), schedules=("v-half", "unrun"))
    model, cluster = load_model("llama3-8b"), load_cluster("h100:8")
    points = candidates(model, cluster, space, global_batch_size=64, seq_len=4096)
    assert {point.job.schedule for point in points} == {"v-half", "unrun"}


def test_the_schedules_of_public_trainers() -> None:
    """Those whose rows equal torch's (tests/schedules/test_torch_oracle.py), and those of Megatron-LM."""
    without = {name for name, each in SCHEDULES.items() if not each.trainers}
    assert without == {"v-half", "v-min", "dualpipe"}


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_a_registered_schedule_has_the_step_and_memory_of_ours_with_the_same_rows() -> None:
    space = SearchSpace(tp=(2,), pp=(2,), micro_batch_size=(1,), recompute=((),), offload=((),), balanced=(True,))
    found = find_plan("llama3-8b", "h100:8", space=space, tokens_per_batch=1 << 20)
    ours, theirs = (
        next(each.simulated_whole() for each in found.fitting if each.job.schedule == name)
        for name in ("zb-h1", "mine")
    )
    assert theirs.job == replace(ours.job, schedule="mine")
    assert (theirs.ticks, theirs.memory) == (ours.ticks, ours.memory)


def test_overlapped_schedules_are_those_with_paired_cells() -> None:
    for name, each in SCHEDULES.items():
        rows = each.generate(each.size(4, None, 8)).rows
        assert each.overlapped == any(len(cell.actions) > 1 for row in rows for cell in row), name
