"""The test files that a change can affect: those whose imports, followed through the checkout, meet it.

    pytest --since main            tests that the change since `main` can affect, uncommitted files included
    python -m tests.support.since 20    what 20 commits would choose: files, and CPU seconds by tests/README.md

An import counts wherever it is written, in a function too; so do names of modules and scripts in strings, and the names
that a package imports when they are asked for (`treadle.Pipeline`). What cannot be followed chooses everything: a file
that is no module, unless it is a page, which chooses the tests that name `.md`; a module that is gone; a `conftest.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
ALL_SOURCES = "*.py"
"""A test with this in a string, or with grimp, looks at every module."""
SINCE, EVERY = "since", "tests"
"""What a worker is told by, and what it is told where nothing is left out."""
MUTE = ("tests.support.rank_pool", "tests.support.since")
"""Their strings mean nothing: the first has modules imported before ranks need them, the second is this one."""
_MODULE = re.compile(r"\b(?:treadle|tests|docs)(?:\.[a-z_0-9]+)+\.?")
_SCRIPT = re.compile(r"\b(\w+\.py)\b")


@dataclass
class Reads:
    """What one module's text names."""

    imports: set[str] = field(default_factory=set)
    strings: list[str] = field(default_factory=list)
    lazy: dict[str, str] = field(default_factory=dict)
    """Of a package with `__getattr__`: the module of each name."""


def module_of(path: Path) -> str:
    """The name that a file is imported by: `treadle.ir`, `tests.conftest`, and for scripts `benchmarks.update`."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the checkout, by name."""
    found = (path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return {module_of(path): path for path in found if "__pycache__" not in path.parts}


def read(text: str) -> Reads:
    """What a text imports and names; the imports for types alone only where names are looked up by them."""
    tree, reads = ast.parse(text), Reads()
    is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    for node in _nodes(tree):
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")) if is_lazy:
                pairs = [
                    (each.module, name) for each in node.body if isinstance(each, ast.ImportFrom) for name in each.names
                ]
                reads.lazy |= {name.asname or name.name: f"{module}.{name.name}" for module, name in pairs}
            case ast.Import():
                reads.imports |= {name.name for name in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                reads.imports |= {f"{module}.{name.name}" for name in node.names}
            case ast.Attribute(value=ast.Name("treadle"), attr=name):
                reads.imports.add(f"treadle.{name}")
            case ast.Constant(value=str(value)) if not is_lazy:
                reads.strings.append(value)
    return reads


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, but what is there for types, and docstrings."""
    for child in ast.iter_child_nodes(node):
        yield child
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_for_types and not is_docstring:
            yield from _nodes(child)


class Graph:
    """Which module needs which."""

    def __init__(self, root: Path = ROOT) -> None:
        self.paths = modules(root)
        self.reads = {name: read((root / path).read_text("utf-8")) for name, path in self.paths.items()}
        self._scripts = {path.name: name for name, path in self.paths.items() if path.parts[0] not in ("src", "tests")}
        self._needs = {name: set(self._resolved(name)) - {name} for name in self.paths}

    def _resolved(self, module: str) -> Iterator[str]:
        reads = self.reads[module]
        for name in reads.imports:
            yield from self._found(name)
        for parent in _parents(module):
            yield from {parent, f"{parent}.conftest"} & self.paths.keys()
        for text in reads.strings if module not in MUTE else ():
            for name in _MODULE.findall(text):
                if name.endswith("."):
                    yield from (each for each in self.paths if each.startswith(name))
                else:
                    yield from self._found(name)
                    yield from {f"{name}.__main__"} & self.paths.keys()
            yield from (self._scripts[name] for name in _SCRIPT.findall(text) if name in self._scripts)

    def _found(self, name: str) -> Iterator[str]:
        """The modules that importing a name loads; scripts import those beside them by their bare names."""
        for full in (name, f"benchmarks.{name}"):
            parts = full.split(".")
            for end in range(len(parts), 0, -1):
                package = ".".join(parts[:end])
                if package in self.paths:
                    yield package
                    if end < len(parts) and parts[end] in self.reads[package].lazy:
                        yield from self._found(self.reads[package].lazy[parts[end]])
                    break

    def closure(self, module: str) -> set[str]:
        """A module and all that it needs."""
        seen, left = {module}, [module]
        while left:
            more = self._needs[left.pop()] - seen
            seen |= more
            left += more
        return seen

    def affected(self, changed: Iterable[str]) -> set[str] | None:
        """The test files that changed files can affect; None if that is all of them."""
        of_path = {path.as_posix(): name for name, path in self.paths.items()}
        known, pages = set[str](), False
        for path in changed:
            if path.endswith(".md"):
                pages = True
            elif path in of_path and not path.endswith("conftest.py"):
                known.add(of_path[path])
            else:
                return None
        return {
            self.paths[name].as_posix()
            for name in self.tests()
            if (needs := self.closure(name)) & known
            or (pages and self._names(needs, ".md"))
            or (known and self._names(needs, ALL_SOURCES))
        }

    def tests(self) -> list[str]:
        """Every module of tests."""
        return [
            name for name in self.paths if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
        ]

    def _names(self, needs: set[str], word: str) -> bool:
        """Whether a string outside of the package has a word; grimp has all sources."""
        return any(
            any(word in text for text in self.reads[name].strings)
            or (word == ALL_SOURCES and "grimp" in self.reads[name].imports)
            for name in needs
            if not name.startswith("treadle") and name not in MUTE
        )


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_since(revision: str) -> list[str]:
    """Files that differ from a revision, and those that git does not know yet."""
    return _git("diff", "--name-only", "--no-renames", revision) + _git("ls-files", "--others", "--exclude-standard")


class Since:
    """Leaves out what a change cannot affect, in the process that collects and, told by it, in its workers."""

    def __init__(self, revision: str, told: list[str] | None) -> None:
        affected = None if told is not None else Graph().affected(changed_since(revision))
        self.revision = revision
        self.chosen = told if told is not None else sorted(affected) if affected is not None else [EVERY]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of xdist begins."""
        node.workerinput[SINCE] = self.chosen

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave a file out before it is imported; None leaves the decision to others."""
        if self.chosen == [EVERY] or not collection_path.name.startswith("test_") or collection_path.is_dir():
            return None
        return None if collection_path.relative_to(ROOT).as_posix() in self.chosen else True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how much was left out."""
        num = "all" if self.chosen == [EVERY] else str(len(self.chosen))
        terminalreporter.write_line(
            f"since {self.revision}: {num} of {len(list((ROOT / 'tests').rglob('test_*.py')))} files"
        )


def main(num: int) -> None:
    """Print what the last commits would have chosen, by the imports as they are now."""
    graph, total_s = Graph(), 0.0
    table = (ROOT / "tests" / "README.md").read_text("utf-8")
    listed = {
        f"tests/{name}": float(cpu) for name, cpu in re.findall(r"^\| ([\w/]+\.py) \| (\d+) \|", table, re.MULTILINE)
    }
    (whole,) = re.findall(r"on two cores: ([\d,]+) s of CPU", table)
    whole_s, files = float(whole.replace(",", "")), [graph.paths[name].as_posix() for name in graph.tests()]
    other_s = (whole_s - sum(listed.values())) / (len(files) - len(listed))
    num_files = 0
    for line in _git("log", "--no-merges", f"-{num}", "--format=%h %s"):
        changed = _git("show", "--name-only", "--no-renames", "--format=", line.split()[0])
        found = graph.affected(changed)
        chosen = found if found is not None else set(files)
        seconds = sum(listed.get(each, other_s) for each in chosen)
        num_files, total_s = num_files + len(chosen), total_s + seconds
        print(f"{len(chosen):4} files {seconds:5.0f} s  {line}")  # noqa: T201 - a command
    share, cpu = num_files / num / len(files), total_s / num / whole_s
    print(f"of {len(files)} files {share:.0%}, of {whole_s:.0f} s of CPU {cpu:.0%}")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
