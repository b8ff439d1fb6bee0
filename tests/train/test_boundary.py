"""The trainer and the optimizer use a Pipeline's methods and public properties, and nothing inside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import treadle
from treadle.runtime import Pipeline

TRAIN = Path(treadle.__file__).parent / "train"
STATE = {"position", "report"}
"""What a Pipeline has beside methods and properties: where its rank stands, and what the last step found."""

PUBLIC = {name for name in vars(Pipeline) if not name.startswith("_")} | STATE


def reached(source: str) -> Iterator[tuple[int, str]]:
    """Each attribute that is read of a `pipe`, `self.pipe` or `self._pipe`, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in ("pipe", "_pipe"):
                yield node.lineno, node.attr


def test_what_reaches_inside_is_found() -> None:
    source = "pipe.step(x)\nself._pipe.gradients.shards()\nself.pipe._part\npipe.stages[0].module"
    assert [(line, name) for line, name in sorted(reached(source)) if name not in PUBLIC] == [
        (2, "gradients"),
        (3, "_part"),
        (4, "stages"),
    ]


@pytest.mark.parametrize("path", sorted(TRAIN.rglob("*.py")), ids=lambda path: str(path.relative_to(TRAIN)))
def test_the_trainer_stays_outside_a_pipeline(path: Path) -> None:
    inside = [f"{path.name}:{line} reads pipe.{name}" for line, name in reached(path.read_text()) if name not in PUBLIC]
    assert not inside
