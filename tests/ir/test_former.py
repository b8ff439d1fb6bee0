"""Files written under the project's former name are read, and say what they said; nothing else has that name."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import treadle
from tests.support.paths import GOLDEN, ROOT
from treadle.export.chrome import load as load_chrome
from treadle.export.npz import load_program, load_trace

FORMER = GOLDEN / "former"
ALLOWED = ("CHANGELOG.md", "src/treadle/ir/former.py", "tests/golden/former/", "tests/ir/test_former.py")


@pytest.mark.parametrize("form", ["txt", "json"])
def test_schedule_of_before_is_read(form: str) -> None:
    schedule = treadle.load(FORMER / f"schedule.{form}")
    assert schedule == treadle.generate("interleaved-overlap", pp=2, microbatches=4)


def test_program_and_traces_of_before_are_read() -> None:
    program = treadle.lower(
        treadle.generate("1f1b", pp=2, microbatches=2), treadle.load_costs("unit"), treadle.LoweringOptions()
    )
    trace = treadle.simulate(program, treadle.load_costs("unit"))
    assert np.array_equal(load_program(FORMER / "program.npz").kind, program.kind)
    for read in (load_trace(FORMER / "trace.npz"), load_chrome(FORMER / "trace.json")):
        assert np.array_equal(read.program.dep, program.dep)
        assert np.array_equal(read.start, trace.start)
        assert np.array_equal(read.end, trace.end)


def test_a_version_that_was_never_written_is_refused_under_either_name() -> None:
    for name in ("weft", "treadle"):
        with pytest.raises(ValueError, match=r"'treadle-schedule 7' is not a form this version reads"):
            treadle.loads(f"# {name}-schedule 7\n0: F0.0 B0.0\n")


def test_nothing_else_has_the_former_name() -> None:
    found = subprocess.run(
        ["git", "grep", "--untracked", "-Iil", "weft"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode not in (0, 1):
        pytest.skip("not a git checkout")
    assert [path for path in found.stdout.split() if not path.startswith(ALLOWED)] == []
