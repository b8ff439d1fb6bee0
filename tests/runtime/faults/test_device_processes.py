"""Faults on a device in real processes: a kernel hangs, a host sleeps or is stopped, a rank is gone.

Every rank names the lost one, and its op whose start has passed and whose end has not. The victim of a kernel names
itself: its host runs on, and only its streams show where it is.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.runtime.faults.test_cells import all_hold, failure_of, nothing_left, side_by_side
from tests.runtime.faults.test_layers import VICTIM, WORLD, Case, look_at_sleeper, take_part
from tests.support.devices import DEVICE_TYPE
from tests.support.faults import deadlines_for, hold_to
from tests.support.ranks import Outcome, run_ranks
from treadle import sim_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE_TYPE != sim_device.NAME, reason="hangs a device; TREADLE_TEST_DEVICE=sim"),
]

__all__ = ["side_by_side"]

KINDS = {"kernel": "hung", "sleep": "hung", "stop": "hung", "kill": "killed"}
BY_DAY = [
    Case("attn", "kernel"),
    Case("dispatch", "kernel", "interleaved-overlap", 0),
    Case("attn", "stop"),
    Case("combine, back", "kill", "interleaved-overlap", 0),
]
AT_NIGHT = [
    Case("combine, back", "kernel"),
    Case("weight half", "kernel", "interleaved-overlap", 0),
    Case("receive", "kernel"),
    Case("offload", "kernel"),
    Case("reduction", "kernel", "1f1b", 0),
    Case("dispatch", "sleep"),
    Case("receive", "sleep", "interleaved-overlap", 0),
    Case("send", "stop", "interleaved-overlap", 0),
    Case("attn", "kill"),
]


def look_at(outcome: Outcome[None], case: Case, directory: Path) -> None:
    """Hold what a rank raised against what happened."""
    error = failure_of(outcome)
    assert error.type == "RankLostError", error.traceback
    told = (directory / f"{'shown' if case.fault in ('kill', 'stop') else 'op'}{VICTIM}").read_text()
    seen = error.attributes
    assert (seen["rank"], seen["kind"], seen["op"]) == (VICTIM, KINDS[case.fault], told), error.message


def judge(case: Case, directory: Path, outcomes: list[Outcome[None]], _: float) -> float:
    """Hold every rank to the promise; the seconds from the fault to the end of the last."""
    for outcome in outcomes:
        if outcome.rank != VICTIM or case.fault == "kernel":
            look_at(outcome, case, directory)
        elif case.fault == "sleep":
            look_at_sleeper(outcome, case)
        else:
            assert outcome.exitcode == -signal.SIGKILL, str(outcome)
    return max(outcome.ended_s for outcome in outcomes) - float((directory / f"fault{VICTIM}").read_text())


def run_case(case: Case, directory: Path) -> float:
    """Run a case under the first deadline that the machine lets its ranks keep."""
    directory.mkdir()

    def run(deadline_s: float) -> list[Outcome[None]]:
        outcomes = run_ranks(WORLD, take_part, case, deadline_s, directory, new=True)
        nothing_left(directory)
        return outcomes

    deadlines_s = deadlines_for(case.fault, least_s=4.0)
    return hold_to(directory / f"fault{VICTIM}", deadlines_s, run, partial(judge, case, directory))


@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)], ids=["day", "night"])
def test_all_ranks_name_the_lost_one_and_its_op(
    cases: list[Case], tmp_path: Path, side_by_side: ThreadPoolExecutor
) -> None:
    all_hold(side_by_side, {str(case): partial(run_case, case, tmp_path / str(at)) for at, case in enumerate(cases)})
