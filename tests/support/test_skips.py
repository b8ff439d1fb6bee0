"""A skip that nobody listed fails a run that looks at its skips."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.skips import LISTED, allowed

TEXT = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason={reason!r})
def test_skips():
    pass
"""
WHOLE = "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n"


def run(directory: Path, text: str, reason: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(text.format(reason=reason))
    (directory / "test_other.py").write_text("def test_other():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "--rootdir", "."]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
    command += [*options, "--skips", "nightly", "-m", "all", "."]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "options"), [(TEXT, ("-n", "0")), (WHOLE, ("-n", "1"))])
def test_only_listed_skips_pass(text: str, options: tuple[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, text, "lanes as streams need an accelerator", *options)
    assert done.returncode == 0, done.stdout
    assert "1  lanes as streams need an accelerator" in done.stdout
    done = run(tmp_path, text, "only root can become another user", *options)
    assert done.returncode == 1, done.stdout
    assert "not in .ci/skips for nightly: test_it.py" in done.stdout
    assert "only root can become another user" in done.stdout


def test_a_night_may_skip_less_than_a_day() -> None:
    assert set(allowed("nightly")) < set(allowed("day"))


def test_a_line_without_a_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "skips").write_text(LISTED.read_text() + "a reason\n")
    with pytest.raises(AssertionError, match="a line is `pattern"):
        allowed("nightly", tmp_path / "skips")


@pytest.mark.slow
def test_the_whole_run_gives_pytest_options_that_it_knows() -> None:
    """A value that is also a path would be one: conftest's options are unknown then."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith("pytest -m all")]
    command = [sys.executable, "-m", *shlex.split(line, comments=True), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--skips" in line
