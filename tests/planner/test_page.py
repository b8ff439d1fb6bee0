"""The page of a plan: what it shows, and how it is drawn."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from treadle.planner import SearchResult, SearchSpace, find_plan
from treadle.planner.plan_page import page
from treadle.planner.planned_step import PlannedStep

pytestmark = pytest.mark.slow

LIMIT = 60 << 30
SPACE = SearchSpace(tp=(2,), pp=(2,), schedules=("1f1b", "zb-h1"), micro_batch_size=(1,), balanced=(True,))


@pytest.fixture(scope="module")
def made() -> tuple[SearchResult, PlannedStep, str]:
    found = find_plan("llama3-8b", "h100:16", space=SPACE, memory_limit=LIMIT)
    chosen = PlannedStep.of(found.best)
    return found, chosen, page(found, chosen, found.alternatives, directory=Path("my plan"))


def test_front_is_a_staircase(made: tuple[SearchResult, PlannedStep, str]) -> None:
    """Between two jobs nothing was found, so no line slopes from one to the other."""
    svg = ElementTree.fromstring(re.search("<svg.*</svg>", made[2], re.DOTALL)[0])  # type: ignore[index]
    line = svg.find("polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 2 * len(made[0].front) - 1 > 3
    for (x, y), (next_x, next_y) in pairwise(points):
        assert (next_x >= x and next_y == y) or (next_x == x and next_y >= y)


def test_page_has_the_batch_the_precision_and_the_commands(made: tuple[SearchResult, PlannedStep, str]) -> None:
    html = made[2]
    assert "<b>524,288</b><span>tokens: 128 sequences of 4,096</span>" in html
    assert "MFU in bf16" in html
    assert "treadle draw &#x27;my plan&#x27;<" in html
    assert "<!--" not in html


def test_every_colour_has_a_value_by_day_and_by_night(made: tuple[SearchResult, PlannedStep, str]) -> None:
    html = made[2]
    day, night = (
        re.findall(r"(--[a-z]+): #", html.partition("@media (prefers-color-scheme: dark)")[part]) for part in (0, 2)
    )
    assert set(day) == set(night) == set(re.findall(r"var\((--[a-z]+)\)", html))
    assert re.findall("#[0-9a-f]{3,6}", html.rpartition("body {")[2]) == []
    for name in made[1].estimate.memory[0]._fields:
        assert f".{name} {{ background: var(--{name}); }}" in html
