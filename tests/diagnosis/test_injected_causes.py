"""A grid of runs with one injected cause each: `treadle why` names it, or what cannot be told apart from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.support.injected_causes import CAUSES, FORMS, NUM_STEPS, Run, execute, verdict, write
from treadle.diagnosis import analyse
from treadle.ir.ops import OpKind
from treadle.ir.steps import Steps
from treadle.passes.measured import measured_program
from treadle.profiles.importing import import_profile
from treadle.simulator import Durations

FOUND = ("right", "not to be told apart")
QUICK = {(4, 1, 2, "torch on CPU"), (4, 4, 1, "NDTimeline"), (4, 1, 2, "Primus")}


def _grid() -> list[object]:
    found: list[object] = []
    for form in FORMS:
        for pp, dp, vpp in ((4, 1, 1), (4, 1, 2), (4, 4, 1), (4, 4, 2)):
            if form == "Primus" and dp > 1:
                continue
            mark = () if (pp, dp, vpp, form) in QUICK else (pytest.mark.nightly,)
            found += [
                pytest.param(Run(cause, form, pp, dp, vpp), id=f"{cause}-{form}-{dp}-{vpp}", marks=mark)
                for cause in CAUSES
            ]
    return found


@pytest.mark.parametrize("run", _grid())
def test_the_injected_cause_is_named(run: Run, tmp_path: Path) -> None:
    found, sentence = verdict(run, tmp_path)
    assert found in FOUND, sentence


def test_time_between_steps_is_a_share_of_its_own(tmp_path: Path) -> None:
    run = Run("loader on all ranks", "torch on a device", vpp=2)
    report = analyse(import_profile([write(run, tmp_path)]).steps)
    spans = execute(run)
    begins = [min(s.start for own in spans.values() for s in own if s.step == step) for step in range(NUM_STEPS)]
    assert report.measured / 1e6 == pytest.approx(np.diff(begins).mean(), rel=0.01)
    assert next(iter(report.shares)) == "between"
    assert report.between == pytest.approx(report.shares["between"])
    assert report.between > 0.15
    assert "data loader" in report.cause.sentence


def test_clocks_that_no_message_links_are_not_subtracted(tmp_path: Path) -> None:
    measured = []
    for cause in ("none", "clocks between replicas"):
        directory = tmp_path / cause
        directory.mkdir()
        imported = import_profile([write(Run(cause, "torch on a device", num_dp=4), directory)])
        measured.append(analyse(imported.steps).measured)
    assert measured[1] == pytest.approx(measured[0], rel=1e-6)
    assert any("each step is taken to begin on them together" in str(remark) for remark in imported.remarks)


def _steps(*, pp: int = 4, dp: int = 1, vpp: int = 1, slow: dict[tuple[int, int], float], last: float = 1.0) -> Steps:
    """Three steps in which workers, by (dp, pp), and the last stage take so many times as long as the others."""
    schedule = treadle.generate(
        "interleaved" if vpp > 1 else "1f1b", pp=pp, vpp=vpp if vpp > 1 else None, microbatches=8
    )
    program = measured_program(schedule, dp=dp)
    rank = program.lane_rank[program.lane_of]
    each = np.select([program.kind == OpKind.F, program.kind == OpKind.B], [10.0, 20.0], 0.1)
    computes = np.isin(program.kind, (OpKind.F, OpKind.B))
    for (replica, place), times in slow.items():
        each[computes & (rank == place * dp + replica)] *= times
    each[computes & (rank // dp == pp - 1) & (program.chunk == vpp - 1)] *= last
    random = np.random.default_rng(0)
    traces = [
        treadle.simulate(program, Durations(np.rint(each * random.normal(1, 0.01, len(each)) * 1e6).astype(np.int64)))
        for _ in range(3)
    ]
    return Steps(program, (0, 1, 2), np.stack([t.start for t in traces]), np.stack([t.end for t in traces]))


def test_one_slow_worker_of_many_is_accused_alone() -> None:
    cause = analyse(_steps(pp=4, dp=64, slow={(3, 2): 1.5})).cause
    assert (cause.what, cause.dp, cause.pp) == ("worker", 3, 2)
    assert "more" not in cause.sentence
    several = analyse(_steps(pp=4, dp=64, slow={(3, 2): 1.5, (9, 0): 1.4})).cause
    assert "(dp 3, pipeline rank 2) (and 1 more)" in several.sentence


@pytest.mark.parametrize("slow", [1.3, 1.5, 1.8])
@pytest.mark.parametrize("last", [1.2, 1.4])
def test_a_slow_worker_is_not_its_replica(slow: float, last: float) -> None:
    report = analyse(_steps(dp=4, slow={(1, 0): slow}, last=last))
    assert report.cause.what != "replica"
    assert report.shares["replica"] == 0 < report.shares["worker"]
    if report.cause.what == "worker":
        assert (report.cause.pp, report.cause.dp) == (0, 1)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 2), (2, 3), (2, 4)])
def test_a_slow_worker_and_a_slow_replica_of_few_are_no_stage(pp: int, dp: int, vpp: int) -> None:
    for slow in (1.5, 2.5):
        worker = analyse(_steps(pp=pp, dp=dp, vpp=vpp, slow={(1, 0): slow})).cause
        assert (worker.what, worker.dp, worker.pp) == ("worker", 1, 0), worker.sentence
        replica = analyse(_steps(pp=pp, dp=dp, vpp=vpp, slow={(1, place): slow for place in range(pp)})).cause
        assert (replica.what, replica.dp) == ("replica", 1), replica.sentence


def test_a_slow_machine_without_replicas_is_no_stage() -> None:
    cause = analyse(_steps(vpp=2, slow={(0, 2): 1.5})).cause
    assert (cause.what, cause.pp) == ("rank", 2)
    assert "in all its stages (2 and 6)" in cause.sentence
    alone = analyse(_steps(slow={(0, 2): 2.5})).cause
    assert (alone.what, alone.stage, alone.pp) == ("stage or rank", 2, 2)
    assert "stage 2's layers, or the machine of rank 2" in alone.sentence
    assert "moving" not in alone.sentence


def test_no_sentence_moves_a_whole_stage() -> None:
    for times in (1.5, 2.0, 2.5, 4.0):
        cause = analyse(_steps(dp=2, slow={}, last=times)).cause
        assert (cause.what, cause.stage) == ("stage", 3)
        assert "moving 1" not in cause.sentence, cause.sentence
        assert ("of a stage's layers" in cause.sentence) == (times < 2.2)


def test_gaps_that_cost_less_than_a_slow_rank_come_second() -> None:
    steps = _steps(vpp=2, slow={(0, 1): 2.0})
    start = np.rint(steps.start * 1.2).astype(np.int64)
    report = analyse(replace(steps, start=start, end=start + (steps.end - steps.start)))
    assert report.cause.what == "rank"
    assert list(report.shares)[:2] == ["rank", "gaps"]
    assert "; also, gaps " in report.cause.sentence
