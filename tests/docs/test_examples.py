"""The examples, on ranks as their first lines say; docs/run.md runs any_model.py by torchrun itself."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.torchrun import torchrun

EXAMPLES = ROOT / "examples"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
NEEDED = {"runtime": "run", "moe": "run", "update": "update", "train": "train", "models": "train"}
"""The extra that each package of Treadle that an example imports comes with."""


def packages(extras: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=]", line)[0] for extra in extras for line in EXTRAS[extra]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_what_an_example_says_to_install_is_what_it_imports(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    said = re.search(r"It needs: pip install '\.\[([\w,]+)\]'( beside vLLM)?", ast.get_docstring(tree) or "")
    assert said is not None
    extras = said[1].split(",")
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    for name in names:
        top, _, rest = name.partition(".")
        if top == "treadle" and rest.partition(".")[0] in NEEDED:
            assert packages([NEEDED[rest.partition(".")[0]]]) <= packages(extras), name
        elif top not in sys.stdlib_module_names and top not in ("treadle", "vllm"):
            assert top in packages(extras), name


def test_all_is_every_extra_of_users() -> None:
    (line,) = EXTRAS["all"]
    named = re.fullmatch(r"treadle\[([\w,]+)\]", line)
    assert named is not None
    assert {*named[1].split(",")} == set(EXTRAS) - {"all", "docs", "dev"}


def test_any_model_is_short() -> None:
    assert len((EXAMPLES / "any_model.py").read_text().splitlines()) < 50


@pytest.mark.slow
def test_a_layer_in_segments_learns(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in torchrun(4, EXAMPLES / "moe_layer.py", cwd=tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len((EXAMPLES / "moe_layer.py").read_text().splitlines()) < 80


@pytest.mark.slow
def test_a_schedule_of_your_own(tmp_path: Path) -> None:
    shown = torchrun(2, EXAMPLES / "custom_schedule.py", cwd=tmp_path)
    found = re.findall(r"loss (\d+\.\d{6}), in one process (\d+\.\d{6}), gradients differ by at most", shown)
    assert len(found) == 2, shown
    for loss, alone in found:
        assert float(loss) == pytest.approx(float(alone), abs=2e-6)
