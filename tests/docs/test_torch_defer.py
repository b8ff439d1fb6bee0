"""docs/results/torch_defer_pp_recv.md: torch's wrong gradients, and the verifier's finding before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treadle
from docs.pages import DOCS, ROOT, blocks
from tests.support.torchrun import torchrun

PAGE = DOCS / "results" / "torch_defer_pp_recv.md"
SCRIPT = "defer_pp_recv.py"
KEPT = ROOT / "examples" / "torch" / "zbv_defer_pp_recv.csv"
_OFF = re.compile(r"^(Schedule\w+) defer_pp_recv=(\w+): gradients off by (\S+)$", re.MULTILINE)


@pytest.mark.slow
def test_what_torch_trains_wrong_is_found_before_it_runs(tmp_path: Path) -> None:
    (script,) = (block for block in blocks(PAGE.read_text("utf-8")) if block.title == SCRIPT)
    (tmp_path / SCRIPT).write_text(script.text)
    shown = torchrun(4, tmp_path / SCRIPT, cwd=tmp_path)
    off = {(name, deferred == "True"): float(error) for name, deferred, error in _OFF.findall(shown)}
    assert len(off) == 4
    for (name, deferred), error in off.items():
        report = treadle.verify(treadle.load(tmp_path / f"{name}-{deferred}.csv"))
        codes = {finding.code for finding in report.findings}
        if deferred:
            assert error > 0.1
            assert "T204" in codes
        else:
            assert error < 1e-12
            assert not codes


def test_the_kept_file_is_what_the_page_says_of_it() -> None:
    report = treadle.verify(treadle.load(KEPT))
    assert report.findings[0].code == "T204"
    assert "B0.1 is filled with F6.0: both are number 7 on the channel from rank 0" in str(report)
