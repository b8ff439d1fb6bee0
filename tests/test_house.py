"""The house rules that a linter does not know: names occur once, no import circles, no schedule or op by name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
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
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SRC)))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double.keys() <= SIBLINGS, double


SAME_FILE_NAMES = {"__init__.py", "__main__.py", "errors.py"}
"""File names that every room may have."""


def test_file_names_are_unique() -> None:
    """A file's name says its subject. Files of commands are siblings, and have the commands' names."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        if path.parent != SRC / "cli" / "commands":
            places[path.name].append(str(path.relative_to(SRC)))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double.keys() <= SAME_FILE_NAMES, double


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, and so do those for type checkers: whoever reads one module has to read both."""
    assert _circles(imports(with_types=True)) == []


ENUMERATE_KINDS = {
    "passes/layers.py": "templates of cells",
    "passes/measured.py": "the template of a measured step",
    "runtime/run/handlers.py": "handlers",
}
"""The modules besides the table, `ir/ops.py`, that may list op kinds; every other one reads columns of it."""

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def test_only_the_table_templates_and_handlers_enumerate_op_kinds() -> None:
    sources = sorted(SRC.rglob("*.py"))
    found = {str(path.relative_to(SRC)): lines for path in sources if (lines := _enumerations(_nodes(path)))}
    assert found.keys() == ENUMERATE_KINDS.keys(), found


def test_an_enumeration_of_op_kinds_is_found() -> None:
    def of(source: str) -> list[int]:
        return _enumerations(ast.walk(ast.parse(source)))

    assert of("LATE = {OpKind.CLIP: 1, OpKind.GC: 2, **dict.fromkeys((OpKind.F, OpKind.B), 3)}") == [1]
    assert of("x = (OpKind.F, OpKind.B)\ny = f(OpKind.I, OpKind.W, OpKind.GC)") == []
    assert of("ok = A.kind <= OpKind.W") == [1]


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _enumerations(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines of literals with three or more op kinds, and of comparisons by their numbers, which order nothing."""
    lines = []
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and sum(map(_is_kind, ast.walk(node))) > 2:
            lines.append(node.lineno)
        elif isinstance(node, ast.Compare) and any(isinstance(each, ORDERS) for each in node.ops):
            lines += [node.lineno] * any(_is_kind(each) for each in (node.left, *node.comparators))
    return lines


def _is_kind(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "OpKind"


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
    return {node.value for node in _nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
