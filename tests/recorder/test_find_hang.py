"""Hangs of real processes, whose transport writes dumps: each cause is named, from the files alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command import treadle as typed
from tests.support.json_output import read_json
from tests.support.paths import ROOT
from tests.support.recorded_transport import RecordedRun, record, same_on_all
from treadle.ir import Schedule
from treadle.recorder import HangReport, find_hang
from treadle.schedules import generate

ONE = generate("1f1b", pp=4, microbatches=6)
TWO = generate("interleaved", pp=4, vpp=2, microbatches=8)
SMALL = generate("1f1b", pp=2, microbatches=4)
GPIPE = generate("gpipe", pp=4, microbatches=6)
V = generate("zb-v", pp=4, microbatches=8)


class Case(NamedTuple):
    """A run that hangs, and what is said of it."""

    run: Callable[[Path], RecordedRun]
    schedule: Schedule
    cause: str
    at_fault: list[int]
    ops: list[str]
    lost: tuple[int, ...] = ()
    """Ranks whose files are lost afterwards."""


CASES = {
    "a host that stops": Case(lambda at: same_on_all(TWO, at, stalled=(2, "F6.1")), TWO, "stopped", [2], ["F6.1"]),
    "a host that stops on the last rank, with times": Case(
        lambda at: same_on_all(ONE, at, stalled=(3, "F2.0"), timing=True), ONE, "stopped", [3], ["F2.0", "B2.0"]
    ),
    "a host that waits for each cell, dumps in JSON": Case(
        lambda at: same_on_all(V, at, stalled=(1, "I2.0"), form="json", blocking=True),
        V,
        "stopped",
        [1],
        ["W4.1", "I2.0"],
    ),
    "a host that stops, small messages, late receives": Case(
        lambda at: same_on_all(ONE, at, stalled=(1, "F3.0"), at_use=True, eager=True), ONE, "stopped", [1], ["F3.0"]
    ),
    "a rank that is killed": Case(
        lambda at: same_on_all(ONE, at, stalled=(2, "B1.0"), killed=True), ONE, "no-dump", [2], ["B1.0"]
    ),
    "a rank that is killed, and left an old dump": Case(
        lambda at: same_on_all(ONE, at, stalled=(2, "B1.0"), killed=True, early_dump=True),
        *(ONE, "old-dump", [2], ["B1.0"]),
    ),
    "a rank of another schedule": Case(
        lambda at: RecordedRun(at, (ONE, GPIPE, ONE, ONE)),
        ONE,
        "order",
        [1],
        ["send F3.0 to rank 2", "send B0.0 to rank 0"],
    ),
    "a circle": Case(
        lambda at: same_on_all(SMALL, at, at_use=True, steps=1),
        *(SMALL, "circle", [0, 1], []),
    ),
    "a buffer that begins within a step": Case(
        lambda at: same_on_all(TWO, at, stalled=(2, "F6.1"), steps=3, buffer_size=40), TWO, "stopped", [2], ["F6.1"]
    ),
    "a buffer in an order of its own": Case(
        lambda at: same_on_all(
            TWO, at, stalled=(1, "F6.1"), steps=3, buffer_size=75, at_use=True, communicators="channel"
        ),
        *(TWO, "stopped", [1], ["F6.1"]),
    ),
    "a file that is missing, of another rank": Case(
        lambda at: same_on_all(TWO, at, stalled=(2, "F6.1")), TWO, "stopped", [2], ["F6.1"], (0,)
    ),
    "a file that is missing, next to the cause": Case(
        lambda at: same_on_all(TWO, at, stalled=(2, "F6.1")), TWO, "stopped", [2], ["F6.1"], (3,)
    ),
    "a run that has ended": Case(lambda at: same_on_all(ONE, at), ONE, "outside", [], []),
}


def hang_of(case: Case, directory: Path) -> HangReport:
    record(case.run(directory))
    for rank in case.lost:
        (directory / f"trace_{rank}").unlink()
    return find_hang(directory, case.schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cause_of_a_hang_of_real_processes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (found,) = hang_of(case, tmp_path).pipelines
    assert (found.cause, list(found.at_fault)) == (case.cause, case.at_fault), found.sentence
    if case.ops:
        assert list(found.ops) == case.ops
    if case.cause in ("stopped", "no-dump", "old-dump"):
        seen = set(range(case.schedule.pp)) - set(case.at_fault) - set(case.lost)
        assert seen <= set(found.waits)
        for rank in seen:
            assert f"rank {case.at_fault[0]}: " in found.waits[rank][-1]


EXAMPLES = ROOT / "examples" / "dumps"


def test_examples_of_the_pages() -> None:
    stalled = find_hang(EXAMPLES / "stalled", generate("1f1b", pp=4, microbatches=4))
    assert stalled.sentence == "rank 2 stopped at B1.0: it had all that it needs, and launched nothing after it"
    circle = find_hang(EXAMPLES / "circle", SMALL)
    assert circle.pipelines[0].cause == "circle"
    assert len(circle.pipelines[0].circle) == 4


def test_one_door_for_command_and_python() -> None:
    words = ("hang", str(EXAMPLES / "stalled"), "--schedule", "1f1b", "--pp", "4", "-m", "4")
    done = typed(*words, "--json")
    assert done.returncode == 0
    printed = read_json("hang", done.stdout)
    report = find_hang(EXAMPLES / "stalled", generate("1f1b", pp=4, microbatches=4))
    assert printed == {"treadle-hang": 1, **report.as_dict()}
    assert "Rank 2 stopped at B1.0" in typed(*words).stdout


def test_another_size_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="in groups of 4 ranks, and the schedule has 2; name the schedule that ran"):
        find_hang(EXAMPLES / "stalled", SMALL)


def test_a_rank_without_a_file_is_remarked_on(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "stalled", tmp_path / "some")
    (tmp_path / "some" / "trace_2").unlink()
    report = find_hang(tmp_path / "some", generate("1f1b", pp=4, microbatches=4))
    assert report.remarks == ("rank 2: no dump",)
    assert (report.pipelines[0].cause, report.pipelines[0].at_fault) == ("no-dump", (2,))
    assert report.dumps == (0, 1, 3)


def test_a_group_of_other_ranks_and_its_collectives(tmp_path: Path) -> None:
    """The same dumps as ranks 8, 9, 10 and 11 of a run."""
    for rank in range(4):
        data = (EXAMPLES / "stalled" / f"trace_{rank}").read_bytes()
        moved = data.replace(b"\x0c\x00\x00\x00[0, 1, 2, 3]", b"\x0e\x00\x00\x00[8, 9, 10, 11]")
        assert moved != data
        (tmp_path / f"trace_{8 + rank}").write_bytes(moved)
    (found,) = find_hang(tmp_path, generate("1f1b", pp=4, microbatches=4)).pipelines
    assert (found.cause, found.at_fault, found.ranks) == ("stopped", (2,), (8, 9, 10, 11))
