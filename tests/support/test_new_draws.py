"""Draws are pinned by day and new at night, and what fails at night says the row that keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

from tests.support import budget as budget_module
from tests.support.budget import Budget, KeptDraw
from tests.support.paths import ROOT

DRAWING = """
import json, os
from hypothesis import given, settings, strategies

SEEN = []

@settings(max_examples=5)
@given(strategies.integers())
def test_given(number):
    SEEN.append(number)

def test_draws(budget):
    random = budget.random("it")
    numbers = [random.random() for _ in budget.draws(least=3)]
    print("drawn", json.dumps({"own": numbers, "given": SEEN}))
    assert not os.environ.get("FAILS")
"""


def test_draws_by_day_are_those_of_their_names() -> None:
    assert settings().derandomize
    assert settings().database is None
    assert Budget(1.0).random("a").random() == Random("a").random()
    assert Budget(1.0, seed=7).random("a").random() != Random("a").random()


def test_a_kept_draw_is_reached() -> None:
    assert len(list(Budget(1.0, seed=7, last=40).draws(least=3))) == 41


def run(directory: Path, *options: str, **environment: str) -> tuple[dict[str, Any], str]:
    (directory / "test_it.py").write_text(DRAWING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-n",
        "0",
        "-p",
        "tests.conftest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **environment}
    env.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, *options, "test_it.py"], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    (drawn,) = [line.partition("drawn ")[2] for line in done.stdout.splitlines() if "drawn " in line]
    return json.loads(drawn), done.stdout


@pytest.mark.slow
def test_a_seed_makes_other_draws_and_a_failure_says_how_to_keep_it(tmp_path: Path) -> None:
    day, _ = run(tmp_path)
    assert run(tmp_path)[0] == day
    assert (len(day["own"]), len(day["given"])) == (3, 5)
    night, said = run(tmp_path, "--seed", "7", "--budget", "10", FAILS="1")
    assert (len(night["own"]), len(night["given"])) == (30, 50)
    assert night["own"][:3] != day["own"]
    assert night["given"][:5] != day["given"]
    row = KeptDraw("test_it.py::test_draws", 7, 30)
    assert f"pytest 'test_it.py::test_draws' --seed 7 --budget 10; to keep it, add to KEPT: {row}" in said
    assert eval(str(row), vars(budget_module)) == row
