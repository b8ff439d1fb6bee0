"""The house rules that a linter does not know: class names are unique, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import treadle
from tests.support.rooms import imports

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
