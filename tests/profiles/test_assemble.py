"""A run that is recorded and assembled is the run again: its schedule by name, and every op's time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.profiles.recorded import NS, recorded, traced
from treadle.api import load_save
from treadle.ir.crossings import crossings
from treadle.ir.ops import LaneKind
from treadle.profiles.assemble_run import assemble
from treadle.profiles.recording import Recording
from treadle.schedules import SCHEDULES

ONE_PIPE = [name for name in SCHEDULES if name != "dualpipe"]


@pytest.mark.parametrize("name", ONE_PIPE)
@pytest.mark.parametrize("dp", [1, 2])
def test_what_names_all_is_the_run_again(name: str, dp: int) -> None:
    trace = traced(treadle.generate(name, pp=4, microbatches=8), dp)
    imported = assemble(recorded(trace, steps=3))
    assert imported.schedule == treadle.generate(name, pp=4, microbatches=8)
    assert imported.named
    assert imported.remarks == ()
    assert imported.steps.numbers == (0, 1, 2)
    for step in range(3):
        again = imported.steps.trace(step)
        assert again.program.num_ops == trace.program.num_ops
        unit = NS // trace.clock.ticks
        assert np.array_equal(again.start, (trace.start - trace.start.min()) * unit)
        assert np.array_equal(again.end, (trace.end - trace.start.min()) * unit)


@pytest.mark.parametrize("name", ONE_PIPE)
def test_steps_that_are_not_named_are_counted(name: str) -> None:
    trace = traced(treadle.generate(name, pp=2, microbatches=8))
    assert assemble(recorded(trace, steps=4, names=("mb", "stage"))).steps.numbers == (0, 1, 2, 3)


@pytest.mark.parametrize(("name", "vpp", "num_mb"), [("1f1b", 1, 6), ("gpipe", 1, 6), ("interleaved", 3, 8)])
def test_microbatches_that_are_not_named_are_those_of_the_schedule(name: str, vpp: int, num_mb: int) -> None:
    schedule = treadle.generate(name, pp=4, vpp=vpp, microbatches=num_mb)
    recording = replace(recorded(traced(schedule), steps=2, names=(), messages=False), pp=4, vpp=vpp, num_mb=num_mb)
    imported = assemble(recording)
    assert imported.schedule == schedule
    assert [str(remark) for remark in imported.remarks] == [
        "messages were not recorded; they are taken to leave when they are made, and to take no time"
    ]


def test_where_nothing_is_named_the_number_of_microbatches_is_asked_for() -> None:
    schedule = treadle.generate("1f1b", pp=2, microbatches=6)
    recording = replace(recorded(traced(schedule), steps=2, names=(), messages=False), pp=2)
    with pytest.raises(ValueError, match="give `microbatches`, how many a step has"):
        assemble(recording)
    assert assemble(replace(recording, num_mb=6)).schedule == schedule


def test_a_schedule_of_ones_own_is_told_from_the_nearest() -> None:
    own = treadle.loads("0: F0.0 F1.0 F2.0 B0.0 B1.0 B2.0\n1: F0.0 F1.0 B0.0 B1.0 F2.0 B2.0\n")
    imported = assemble(recorded(traced(own)))
    assert imported.schedule.rows == own.rows
    assert not imported.named
    (remark,) = imported.remarks
    assert "nearest is" in str(remark)


def without(recording: Recording, rank: int) -> Recording:
    return replace(recording, ranks=tuple(each for each in recording.ranks if each.rank != rank))


def test_a_missing_rank_is_refused_by_its_stage() -> None:
    recording = recorded(traced(treadle.generate("1f1b", pp=4, microbatches=8)))
    with pytest.raises(ValueError, match="no file has a forward of stage 2: a rank of the pipeline is missing"):
        assemble(without(recording, 2))


@pytest.mark.parametrize("name", ONE_PIPE)
def test_clocks_that_are_off_by_a_second_are_put_together_and_told(name: str) -> None:
    trace = traced(treadle.generate(name, pp=4, microbatches=8))
    recording = recorded(trace, steps=2, offsets={1: 10**9, 2: -3 * 10**9})
    imported = assemble(replace(recording, ranks=tuple(replace(r, clock=str(r.rank)) for r in recording.ranks)))
    (remark,) = imported.remarks
    assert "clocks were moved to agree with the messages: rank 2 by +3.0" in str(remark)
    again = imported.steps.trace(0)  # and nothing is read before it was made
    found = crossings(again.program)
    assert (again.end[found.maker] <= again.start[found.reader]).all()


def test_a_range_that_waits_for_its_message_begins_when_that_was_made() -> None:
    trace = traced(treadle.generate("1f1b", pp=4, microbatches=8))
    program = trace.program
    waiting = trace.start.copy()
    for lane in np.flatnonzero(program.lane_kind == LaneKind.COMPUTE):  # each op begins when the one before has ended
        first, last = program.lane_ptr[lane : lane + 2]
        waiting[first + 1 : last] = trace.end[first : last - 1]
    recording = replace(recorded(replace(trace, start=waiting), messages=False), waits_inside=True)
    imported = assemble(recording)
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    again, unit = imported.steps.trace(0), NS // trace.clock.ticks
    assert np.array_equal(again.start[compute], trace.start[compute] * unit)
    assert any("they are taken to begin then" in str(remark) for remark in imported.remarks)


def test_a_mark_that_ends_before_it_starts_is_told_and_takes_no_time(tmp_path: Path) -> None:
    recording = recorded(traced(treadle.generate("1f1b", pp=2, microbatches=4)))
    last = recording.ranks[1]
    late = replace(last, end=np.where(np.arange(len(last)) == 0, last.start - 500, last.end))
    imported = assemble(replace(recording, ranks=(recording.ranks[0], late)))
    assert "a mark ends before it starts, and is taken to take no time" in map(str, imported.remarks)
    load_save.save_steps(imported.steps, tmp_path / "trace.json.gz")
    again = load_save.load_steps(tmp_path / "trace.json.gz")
    assert np.array_equal(again.end - again.start, imported.steps.end - imported.steps.start)
    assert (again.numbers, again.about) == (imported.steps.numbers, imported.steps.about)


def test_dualpipes_two_directions_are_not_taken_for_replicas() -> None:
    recording = recorded(traced(treadle.generate("dualpipe", pp=4, microbatches=8)))
    with pytest.raises(ValueError, match="both have stages 0 and 3: replicas of a V placement, or the two directions"):
        assemble(recording)
    replicas = recorded(traced(treadle.generate("dualpipev", pp=2, microbatches=4), dp=2))
    assert assemble(replicas).schedule.name == "dualpipev"
    with pytest.raises(ValueError, match="for replicas give `dp=2`, for DualPipe"):
        assemble(replace(replicas, dp=None))
