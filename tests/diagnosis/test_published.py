"""Three production jobs with published what-if results: every figure, the cause, and the replay of their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import treadle
from tests.support.json_output import read_json
from tests.support.straggler import PUBLISHED, write_timeline
from treadle.cli.app import app
from treadle.diagnosis import analyse
from treadle.diagnosis.whatif import WhatIf
from treadle.ir.execute import makespans
from treadle.ir.ops import OpKind
from treadle.ir.steps import Steps
from treadle.profiles.importing import import_profile
from treadle.simulator import Durations

CAUSES = {"ST": ("stage", 3, None, None), "AR": ("worker", None, 0, 0), "SE": ("microbatches", None, None, None)}


@pytest.fixture(scope="module", params=("ST", "AR", "SE"))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Steps]:
    """A job's name and its steps. The published results of SE leave two of its steps out."""
    name: str = request.param
    imported = import_profile([write_timeline(name, tmp_path_factory.mktemp(name) / "timeline.json.gz")])
    assert (imported.named, imported.schedule.name) == (True, "1f1b")
    told = ["a mark ends before it starts, and is taken to take no time (8 times)"] if name == "SE" else []
    assert list(map(str, imported.remarks)) == told
    return name, imported.steps


def published_steps(name: str, steps: Steps) -> Steps:
    return steps.select([int(number) for number in PUBLISHED[name]["no_gaps_s"]])


@pytest.mark.slow
def test_all_published_figures(job: tuple[str, Steps]) -> None:
    name, steps = job
    published, steps = PUBLISHED[name], published_steps(name, job[1])
    report = analyse(steps).as_dict()
    assert report["S"] == pytest.approx(published["S"], rel=1e-5)
    assert report["times"]["ideal"] / 1e6 == pytest.approx(published["ideal_s"], rel=1e-5)
    assert report["by_kind"] == pytest.approx(published["by_kind"], rel=1e-5)
    assert report["by_stage"] == pytest.approx(published["by_stage"], rel=1e-5)
    assert report["by_dp"] == pytest.approx(published["by_dp"], rel=1e-5)
    for figure in ("M_S", "M_W"):
        assert report[figure] == pytest.approx(published[figure], abs=1e-5)
        assert report["added"][figure] == pytest.approx(published["added"][figure], abs=1e-5)
    whatif = WhatIf.of(steps)
    assert whatif.no_gaps / 1e9 == pytest.approx(list(published["no_gaps_s"].values()), rel=1e-5)
    assert [row["step"] for row in report["by_step"]] == list(map(int, published["no_gaps_s"]))
    assert [row["S"] for row in report["by_step"]] == pytest.approx(whatif.no_gaps / whatif.ideal)


def test_cause(job: tuple[str, Steps]) -> None:
    name, steps = job
    cause = analyse(steps).cause
    assert (cause.what, cause.stage, cause.pp, cause.dp) == CAUSES[name]


def test_replay_of_whole_steps_leaves_only_gaps(job: tuple[str, Steps]) -> None:
    _, steps = job
    short = 1 - WhatIf.of(steps).no_gaps / steps.makespans
    assert 0 < np.median(short) < 0.02
    assert analyse(steps).gaps == pytest.approx(1 - WhatIf.of(steps).no_gaps.mean() / steps.makespans.mean())


def test_replay_of_forward_and_backward_alone(job: tuple[str, Steps]) -> None:
    """With the measured durations and nothing else: no communication, no gaps."""
    name, steps = job
    layout = steps.program.layout
    program = treadle.lower(treadle.generate("1f1b", pp=layout.placement.pp, microbatches=layout.num_mb))
    ours = np.flatnonzero(np.isin(program.kind, (OpKind.F, OpKind.B)))
    replica = WhatIf.of(steps).replica
    computed = np.isin(steps.program.kind, (OpKind.F, OpKind.B))
    ratios: list[float] = []
    for dp in range(layout.dp):
        own = np.flatnonzero(computed & (replica == dp))
        start, end = steps.start[:, own], steps.end[:, own]
        dur = np.zeros((len(steps.numbers), program.num_ops), np.int64)
        dur[:, ours] = end - start
        took = makespans(program, dur)
        assert treadle.simulate(program, Durations(dur[0])).makespan == took[0]
        ratios += (took / (end.max(axis=1) - start.min(axis=1))).tolist()
    assert abs(np.median(ratios) - 1) < (0.011 if name == "SE" else 0.003)


def test_command_says_what_to_do(tmp_path: Path) -> None:
    timeline, page = write_timeline("ST", tmp_path / "timeline.json.gz"), tmp_path / "why.html"
    done = CliRunner().invoke(app, ["why", str(timeline), "-o", str(page), "--steps", "23-40,500-"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "Stage 3, the last, takes 63% longer than the others for a micro-batch: moving 47% of"
    )
    assert "  treadle balance --pp 4 --costs job.toml\n" in done.output
    assert "dp 1" in done.output
    assert "slowest of 23 steps: 23 (1.2" in done.output
    written = page.read_text()
    assert "Stage 3, the last" in written
    assert written.count("<th>dp ") == 2
    assert not any(word in written for word in ("http://", "https://", "<script"))
    done = CliRunner().invoke(app, ["why", str(timeline), "--json"])
    assert read_json("why", done.stdout)["cause"]["what"] == "stage"
