"""`treadle why --follow`: what becomes slower is named within three steps, and a quiet run raises no alarm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.support.command import treadle as run
from tests.support.patience import HUNG_S
from treadle.costs import load_costs
from treadle.diagnosis.follow import STEP, Alarm, FollowedStep, Follower, Observed, observe
from treadle.diagnosis.follow_page import metrics, page
from treadle.ir.steps import Steps
from treadle.ir.trace import Trace
from treadle.passes.mesh import spread
from treadle.simulator.predict import Durations

PP, DP, BEGIN = 4, 2, 31
"""Ranks and replicas of a run, and the step from which on something is slow."""


def measured(num_steps: int, noise: float, factors: dict[int, float], seed: int) -> Iterator[Trace]:
    """Steps whose ops take random times, from BEGIN on multiplied on some ranks."""
    costs = load_costs("deepseek-v3-h800")
    program = spread(treadle.lower(treadle.generate("1f1b", pp=PP, microbatches=8), costs), ep=1, dp=DP)
    rank, predicted = program.lane_rank[program.lane_of], treadle.simulate(program, costs)
    usual = predicted.end - predicted.start
    random = np.random.default_rng(seed)
    for number in range(1, num_steps + 1):
        dur = usual * np.exp(random.normal(0, noise, program.num_ops))
        for slow, factor in factors.items() if number >= BEGIN else ():
            dur[rank == slow] *= factor
        yield treadle.simulate(program, Durations(np.rint(dur).astype(np.int64)))


def followed(num_steps: int, noise: float, factors: dict[int, float], seed: int) -> list[FollowedStep]:
    follower = Follower()
    traces = enumerate(measured(num_steps, noise, factors, seed), start=1)
    return [follower.add(each) for number, trace in traces for each in observe(Steps.of(trace), number)]


@pytest.mark.parametrize("noise", [0.01, 0.1])
@pytest.mark.parametrize("factor", [1.15, 1.5])
def test_a_rank_that_becomes_slow_is_named_within_three_steps(noise: float, factor: float) -> None:
    lines = followed(BEGIN + 12, noise, {2 * DP + 1: factor}, seed=5)
    assert not any(line.alarms for line in lines[: BEGIN - 1])
    for line in lines[BEGIN + 1 :]:
        workers = [alarm for alarm in line.alarms if alarm.what != STEP]
        assert [(alarm.what, alarm.since) for alarm in workers] == [("rank 2 of replica 1", BEGIN)], str(line)
        assert workers[0].rise == pytest.approx(factor - 1, abs=0.1)


def test_what_slows_every_rank_is_the_step_and_accuses_none() -> None:
    lines = followed(BEGIN + 8, 0.02, dict.fromkeys(range(PP * DP), 1.3), seed=6)
    assert not any(line.alarms for line in lines[: BEGIN - 1])
    for line in lines[BEGIN + 1 :]:
        assert [(alarm.what, alarm.since) for alarm in line.alarms] == [(STEP, BEGIN)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_quiet_run_of_a_thousand_steps_raises_no_alarm(seed: int) -> None:
    """Times of 64 workers: normal noise of 3 %, and one step in 47 that takes twice as long."""
    random, follower = np.random.default_rng(seed), Follower()
    for number in range(1_000):
        took = random.normal(1, 0.03, 64)
        slow = 2.0 if number % 47 == 46 else 1.0
        workers = {f"rank {at}": float(each) for at, each in enumerate(took)}
        line = follower.add(Observed(number, slow * random.normal(1, 0.03), 1.0, "", workers))
        assert not line.alarms, str(line)


def test_an_alarm_ends_when_it_is_as_before_and_can_begin_again() -> None:
    follower = Follower()
    states = []
    for number in range(60):
        slow = 20 <= number < 30 or number >= 50
        workers = {"rank 0": 1.0, "rank 1": 1.0, "rank 2": 1.5 if slow else 1.0}
        states.append(follower.add(Observed(number, 1.0, 1.0, "", workers)).alarms)
    assert [bool(alarms) for alarms in states] == [number in (*range(21, 31), *range(51, 60)) for number in range(60)]
    assert {alarms[0].since for alarms in states if alarms} == {20, 50}
    assert str(states[25][0]) == "rank 2 is 50% slower since step 20"


def test_files_are_followed_as_they_come_and_the_exit_code_says_whether_it_is_slower(tmp_path: Path) -> None:
    """Traces are written while the command reads; one is written in two halves, and one never becomes whole."""
    directory = tmp_path / "traces"
    directory.mkdir()
    (directory / "broken.json").write_text('{"traceEvents": [', encoding="utf-8")

    def write() -> None:
        for number, trace in enumerate(measured(BEGIN + 4, 0.02, {0: 1.5}, seed=7), start=1):
            path = directory / f"step{number}.json.gz"
            treadle.save_trace(trace, tmp_path / "whole.json.gz")
            text = (tmp_path / "whole.json.gz").read_bytes()
            if number == 5:
                path.write_bytes(text[: len(text) // 2])
                time.sleep(1.2)
            path.write_bytes(text)

    writer = threading.Thread(target=write)
    writer.start()
    outputs = ("-o", str(tmp_path / "run.html"), "--metrics", str(tmp_path / "run.prom"))
    done = run("why", str(directory), "--follow", "--idle", "12", *outputs)
    writer.join(HUNG_S)
    lines = done.stdout.splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    assert sorted(numbers) == list(range(1, BEGIN + 5)), "each step once"
    assert done.returncode == 1
    assert "rank 0 of replica 0 is 50% slower since step 31" in lines[-1].replace("49%", "50%").replace("51%", "50%")
    assert "broken.json is left out" in done.stderr
    html = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' in html
    assert "slower since step 31" in html
    prometheus = (tmp_path / "run.prom").read_text(encoding="utf-8")
    assert 'treadle_slower_ratio{what="rank 0 of replica 0",since="31"} 0.' in prometheus
    assert list(tmp_path.glob(".*.partial")) == []


def test_a_quiet_directory_ends_with_0(tmp_path: Path) -> None:
    for number, trace in enumerate(measured(3, 0.02, {}, seed=8), start=1):
        treadle.save_trace(trace, tmp_path / f"step{number}.json.gz")
    done = run("why", str(tmp_path), "--follow", "--idle", "3")
    assert done.returncode == 0
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1", "2", "3"]
    assert done.stdout.count("as before") == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("a", "--metrics", "m.prom"), "--metrics and --idle are for --follow"),
        (("a", "b", "--follow"), "--follow takes one directory"),
        (("a", "--follow", "--json"), "--follow takes one directory, and neither --steps nor --json"),
        (("nowhere", "--follow"), "--follow nowhere: give the directory in which traces or profiles appear"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    done = run("why", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr


def test_page_and_metrics_escape_names() -> None:
    line = FollowedStep(Observed(3, 0.5, 1.0, "a < b", {}), (Alarm("rank 1", 2, 0.25),))
    assert "a &lt; b" in page("run <1>", [line])
    assert "run &lt;1&gt;" in page("run <1>", [line])
    assert "treadle_step 3\n" in metrics(line)
