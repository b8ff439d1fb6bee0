"""The house rules that a linter does not know: unique class names, no import circles, no schedule known by name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import treadle
from tests.support.rooms import imports
from treadle.schedules import SCHEDULES
from treadle.view.palette import PALETTES

SRC = Path(treadle.__file__).parent

SIBLINGS: set[str] = set()
"""Class names that occur more than once because siblings of one interface share them."""


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SRC)))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double.keys() <= SIBLINGS, double


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    assert _circles(imports()) == []


def _circles(imports: dict[str, set[str]]) -> list[str]:
    """What is left after modules that import nothing else of what is left are taken away, again and again."""
    left = {module: set(others) for module, others in imports.items()}
    while done := [module for module, others in left.items() if not others & left.keys()]:
        for module in done:
            del left[module]
    return sorted(left)


def test_no_schedule_is_known_by_name_outside_its_room() -> None:
    """What others ask is a field of `Family`. Docstrings and sentences may name schedules; a palette has one's name."""
    found = {
        f"{path.relative_to(SRC)}: {name}"
        for path in sorted(SRC.rglob("*.py"))
        if path.parent != SRC / "schedules"
        for name in _literals(path) & SCHEDULES.keys()
        if not (path == SRC / "view" / "palette.py" and name in PALETTES)
    }
    assert not found


def _literals(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
