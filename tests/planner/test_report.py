"""Texts of a plan that the terminal and the page share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from treadle.folding.stragglers import StragglerRow, StragglerStudy
from treadle.ir.trace import MICROSECONDS
from treadle.planner import SearchResult, SearchSpace, find_plan
from treadle.planner.plan_report import count_text, study_text
from treadle.simulator import Stragglers

SPACE = SearchSpace(tp=(2,), pp=(2,), schedules=("1f1b",), micro_batch_size=(1,), recompute=((),), offload=((),))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return find_plan("llama3-8b", "h100:16", space=SPACE)


@pytest.mark.slow
def test_others_are_spoken_of_where_there_are_others(found: SearchResult) -> None:
    count = len(found.fitting)
    assert (
        count_text(replace(found, memory_limit=67 << 30))
        == f"{count} candidates: 0 do not fit into 67.0 GiB, {count} simulated"
    )
    assert "the rest pruned" in count_text(replace(found, num_candidates=count + 1))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (((100, 110), (120, 150)), "a suffers least and is the fastest with slow GPUs"),
        (((100, 120), (120, 125)), "b suffers least, a is the fastest with slow GPUs"),
    ],
)
def test_one_schedule_is_named_once(steps: tuple[tuple[int, int], ...], told: str) -> None:
    rows = [StragglerRow(n, base, np.array([slow]), MICROSECONDS) for n, (base, slow) in zip("ab", steps, strict=True)]
    assert study_text(StragglerStudy(Stragglers(), 8, 1, tuple(rows))) == told
