"""The README's examples, run as a reader would type them."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TEXT = (ROOT / "README.md").read_text()
SETUP = ("pip install",)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Each command with the output that stands under it."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def trimmed(output: str) -> str:
    """Tables are padded to the terminal's width, which no reader sees."""
    return "".join(line.rstrip() + "\n" for line in output.splitlines())


def test_console_examples(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80"}
    for name in ("FORCE_COLOR", "OMP_NUM_THREADS"):  # set by runners of tests, not by readers
        env.pop(name, None)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ran = 0
    for command, expected in commands():
        if command.startswith(SETUP):
            continue
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        got = trimmed(done.stdout + done.stderr)
        assert doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS), f"$ {command}\n{got}"
        ran += 1
    assert ran >= 8


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples(number: int) -> None:
    exec(compile(blocks("python")[number], "README.md", "exec"), {})
