"""examples/rl_loop.py, on ranks as its first line says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

SCRIPT = ROOT / "examples" / "rl_loop.py"

LINE = re.compile(
    r"version (\d)  loss ([\d.]+)  \[.*\]  (\d) of 6 right  "
    r"waited \d+\.\d\d s for engines, moved (\d+) kB in \d+\.\d\d s, agreed in \d+\.\d\d s"
)


def test_each_version_of_the_loop_is_newer_and_writes_better(tmp_path: Path) -> None:
    printed = torchrun(2, SCRIPT, cwd=tmp_path)
    waiting, *lines = printed.splitlines()
    assert waiting.startswith("starting the engines"), printed
    shown = [LINE.fullmatch(line) for line in lines]
    assert all(shown), printed
    versions, losses, right, size_kb = zip(*(match.groups() for match in shown if match is not None), strict=True)
    assert versions == ("1", "2", "3")
    assert float(losses[0]) > float(losses[1]) > float(losses[2])
    assert int(right[0]) < int(right[2])
    assert len(set(size_kb)) == 1  # each version moves the whole model
    assert int(size_kb[0]) > 100
