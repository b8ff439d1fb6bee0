"""RELEASING names each benchmark that a text quotes."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def test_a_release_runs_every_benchmark_that_a_text_quotes() -> None:
    texts = [ROOT / "README.md", ROOT / "tests" / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    there = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    quoted = {name for path in texts for name in re.findall(r"`[^`]*?(\w+\.py)", path.read_text("utf-8"))} & there
    step = (ROOT / "RELEASING.md").read_text("utf-8").partition("\n4. ")[2].partition("\n5. ")[0]
    named = {*re.findall(r"(\w+\.py)", step)}
    assert len(quoted) > 20
    assert quoted <= named, f"RELEASING.md does not name {sorted(quoted - named)}"
    assert named <= there, f"RELEASING.md names {sorted(named - there)}, which are no benchmarks"
