"""The examples, on ranks as their first lines say; docs/run.md runs any_model.py by torchrun itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def test_any_model_is_short() -> None:
    lines = (EXAMPLES / "any_model.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) <= 40


def test_a_layer_in_segments_learns(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in torchrun(4, EXAMPLES / "moe_layer.py", cwd=tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len((EXAMPLES / "moe_layer.py").read_text().splitlines()) < 80


def test_a_schedule_of_your_own(tmp_path: Path) -> None:
    shown = torchrun(2, EXAMPLES / "custom_schedule.py", cwd=tmp_path)
    found = re.findall(r"loss (\d+\.\d{6}), in one process (\d+\.\d{6}), gradients differ by at most", shown)
    assert len(found) == 2, shown
    for loss, alone in found:
        assert float(loss) == pytest.approx(float(alone), abs=2e-6)
