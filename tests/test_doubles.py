"""Every stand-in of an object that needs a GPU names, method by method, the lines that it copies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.doubles import Lack, lacks
from tests.support.paths import ROOT

INCLUDE = Path(torch.__file__).parent / "include"


def test_every_method_of_every_double_names_its_source() -> None:
    found = list(lacks(sorted((ROOT / "tests").rglob("*.py"))))
    assert not found, (
        "declare a double by @double_of, and begin each of its docstrings with file and lines: "
        + ", ".join(f"{lack.path}: {lack.name}.{lack.method}" for lack in found)
    )


def test_cited_headers_have_these_lines() -> None:
    """Those that this torch is installed with; sources of its backends come with no wheel."""
    version = ".".join(torch.__version__.split(".")[:2])
    cited = re.compile(rf"torch {re.escape(version)} ([\w/.]+\.(?:h|hpp)):(\d+)(?:-(\d+))?")
    found = 0
    for path in sorted((ROOT / "tests" / "support").rglob("*.py")):
        for name, first, last in cited.findall(path.read_text()):
            (header,) = INCLUDE.rglob(name) if "/" not in name else (INCLUDE / name,)
            assert 0 < int(first) <= int(last or first) <= len(header.read_text().splitlines()), (path, name, first)
            found += 1
    assert found or version != "2.13"


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("class A:\n    def wait_stream(self, other): ...", ("A", "")),
        ("@double_of('x')\nclass A:\n    def shutdown(self): ...", ("A", "shutdown")),
        (
            "@double_of('x')\nclass A:\n    def shutdown(self):\n        'torch 2.12: waits.'",
            ("A", "shutdown"),
        ),
        ("@double_of('x')\nclass A:\n    def shutdown(self):\n        'torch 2.12 Process.cpp:5-7: waits.'", None),
        ("class A:\n    def shutdown(self): ...", None),
    ],
)
def test_a_method_without_its_source_is_found(text: str, lack: tuple[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert list(lacks([path])) == ([] if lack is None else [Lack(str(path), *lack)])
