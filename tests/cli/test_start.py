"""What commands import to start, and that small work compiles nothing; `benchmarks/start.py` has the seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HUNG_S

HEAVY = {"matplotlib", "numba", "numpy", "ortools", "pydantic", "rich", "scipy", "torch", "transformers"}
"""What takes a tenth of a second or more to import."""

NEEDED: dict[str, set[str]] = {
    "--version": set(),
    "--help": set(),
    "show 1f1b --pp 4 -m 8": set(),
    "show dualpipe --pp 8 -m 20": set(),
    "simulate dualpipe --pp 8 -m 20": {"numpy", "rich"},
    "verify dualpipe --pp 16 -m 64": {"numpy", "rich"},
}
"""By command, what of it the command needs."""


@pytest.mark.parametrize("command", NEEDED)
def test_a_command_imports_what_it_needs_and_compiles_nothing(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "treadle", *command.split()],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "treadle.cli.app" in imported
    assert HEAVY & imported == NEEDED[command]
    assert not list(tmp_path.rglob("*.nbi")), "something was compiled"
