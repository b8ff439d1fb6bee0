"""The examples, run as their first lines say; docs/run.md runs any_model.py, and test_pages.py that page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import HUNG_S

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def torchrun(num_ranks: int, script: str, directory: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script)], cwd=directory, capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_any_model_is_short() -> None:
    lines = (EXAMPLES / "any_model.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) <= 40


def test_a_layer_in_segments_learns(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in torchrun(4, "moe_layer.py", tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len((EXAMPLES / "moe_layer.py").read_text().splitlines()) < 80


def test_a_schedule_of_your_own(tmp_path: Path) -> None:
    shown = torchrun(2, "custom_schedule.py", tmp_path)  # both ranks write, a line or a part of one at a time
    found = re.findall(r"loss (\d+\.\d{6}), in one process (\d+\.\d{6}), gradients differ by at most", shown)
    assert len(found) == 2, shown
    for loss, alone in found:
        assert float(loss) == pytest.approx(float(alone), abs=2e-6)
