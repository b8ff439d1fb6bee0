"""The files of Programs and Traces: round trips."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.example_traces import (
    COSTS,
    EXAMPLES,
    LONGEST_NS,
    assert_same_program,
    assert_same_trace,
    by_layers,
    costs,
    events_of,
    size_id,
    trace_of,
)
from treadle.fields.fields import Fields
from treadle.files import chrome, npz
from treadle.files.checked_columns import DTYPES
from treadle.files.header import layout_object, read_layout
from treadle.ir import B, F, Placement, Schedule
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import COLUMNS, Layout, Program
from treadle.ir.trace import Clock, Trace
from treadle.passes.cells import lower_cells
from treadle.schedules import SCHEDULES
from treadle.simulator import simulate

# Round trips


def test_every_schedule_is_there() -> None:
    assert {schedule.name for schedule in EXAMPLES} == set(SCHEDULES)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("schedule", EXAMPLES, ids=size_id)
def test_round_trips(schedule: Schedule, cost: str, tmp_path: Path) -> None:
    trace = simulate(lower_cells(schedule), costs(cost))
    npz.save_program(trace.program, tmp_path / "program.npz")
    npz.save_trace(trace, tmp_path / "trace.npz")
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_program(npz.load_program(tmp_path / "program.npz"), trace.program)
    assert_same_trace(npz.load_trace(tmp_path / "trace.npz"), trace)
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)


def test_round_trips_of_every_lane_and_field(tmp_path: Path) -> None:
    trace = by_layers()
    npz.save_trace(trace, tmp_path / "trace.npz")
    chrome.dump(trace, tmp_path / "trace.json.gz")
    assert_same_trace(npz.load_trace(tmp_path / "trace.npz"), trace)
    assert_same_trace(chrome.load(tmp_path / "trace.json.gz"), trace)


@pytest.mark.parametrize("kind", LaneKind)
def test_round_trip_of_a_lane_of_each_kind(kind: LaneKind, tmp_path: Path) -> None:
    trace = by_layers()
    lanes = trace.program.lane_kind.copy()
    lanes[lanes == LaneKind.HOST] = kind
    trace = replace(trace, program=replace(trace.program, lane_kind=lanes))
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)


@pytest.mark.parametrize("clock", [Clock("us", 1000), Clock("ms", 10**6), Clock("unit", 720_720), Clock("s", 10**9)])
def test_round_trip_of_odd_times(clock: Clock, tmp_path: Path) -> None:
    """Ranks of random slowness have times that share no divisor."""
    trace = replace(trace_of(slowness=0.3), clock=clock)
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)


@pytest.mark.parametrize("first", [-(10**15) - 1, -1, 0, 1, 1_700_000_000_123_456_789 // 2])
@pytest.mark.parametrize("unit", ["us", "unit"])
def test_round_trip_of_times_far_from_zero(first: int, unit: str, tmp_path: Path) -> None:
    trace = trace_of(cost="deepseek-v3-h800" if unit == "us" else "unit")
    trace = replace(trace, start=trace.start + first, end=trace.end + first)
    npz.save_trace(trace, tmp_path / "trace.npz")
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(npz.load_trace(tmp_path / "trace.npz"), trace)
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)
    assert min(event["ts"] for event in events_of(tmp_path / "trace.json") if event["ph"] == "X") == 0


@given(st.integers(0, LONGEST_NS), st.integers(0, LONGEST_NS))
@example(LONGEST_NS, LONGEST_NS - 1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nanoseconds_survive_json(tmp_path: Path, first: int, second: int) -> None:
    """Up to 50 days, which is the longest that is written."""
    trace = trace_of("1f1b", 1, 1, "deepseek-v3-h800")
    low, high = sorted((first, second))
    trace = replace(trace, start=np.array([0, low]), end=np.array([low, high]))
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)


def test_round_trip_of_a_schedule_that_hangs(tmp_path: Path) -> None:
    """What nothing provides, and labels that the schedule has no place for, are for the verifier to find."""
    schedule = Schedule("mine", Placement.loop(2), 1, ((F(0), B(0)), (B(0), F(9, 7))), {(0, 1): (F(5),)})
    program = lower_cells(schedule)
    assert -1 in program.dep
    npz.save_program(program, tmp_path / "program.npz")
    assert_same_program(npz.load_program(tmp_path / "program.npz"), program)


def test_round_trip_of_nothing(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 2, 2)
    empty = {name: getattr(trace.program, name)[:0] for name in COLUMNS}
    empty |= {"lane_ptr": np.zeros(1, np.int64), "dep_ptr": np.zeros(1, np.int64)}
    trace = Trace(replace(trace.program, **empty), trace.start[:0], trace.end[:0])
    npz.save_trace(trace, tmp_path / "trace.npz")
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(npz.load_trace(tmp_path / "trace.npz"), trace)
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)


EVERY_FIELD = Layout(
    Placement.v(2),
    2,
    ("Ed", "tt", "t", "mL"),
    (OpKind.ATTN_F, OpKind.MLP_F),
    (OpKind.MLP_B, OpKind.ATTN_B),
    (OpKind.MLP_W, OpKind.MTP_W),
    ep=2,
    dp=3,
    saved={OpKind.ATTN_F: 7},
    kept=0.25,
    saved_unit="layers",
    recomputed=(OpKind.ATTN_R,),
    dense_saved={OpKind.ATTN_F: 5},
    stage_scale=(1.0, 2.0, 0.5, 1.0),
    mb_scale=(1.0, 1.5),
    tied=((0, 3), (0, 1, 3)),
    step_end=(OpKind.CLIP, OpKind.OPTIMIZER),
    buckets=((1, 0), (1, 0), (0,), (1, 0)),
)


def test_all_of_a_layout_and_a_program_is_written() -> None:
    """A field that is added must be added to the files."""
    assert list(layout_object(EVERY_FIELD)) == [field.name for field in fields(Layout)]
    content = json.loads(json.dumps(layout_object(EVERY_FIELD)))
    assert read_layout(Fields.of(content, "mine", "layout")) == EVERY_FIELD
    assert {*COLUMNS, "layout"} == {field.name for field in fields(Program)}
    assert set(DTYPES) == {*COLUMNS, "start", "end"}
    assert {field.name for field in fields(Trace)} == {"program", "start", "end", "clock", "about", "measured"}


def test_files_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        npz.save_trace(trace_of(), tmp_path / f"{name}.npz")
        chrome.dump(trace_of(), tmp_path / f"{name}.json")
    for suffix in ("npz", "json"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


# .npz: what is refused


def test_load_tells_the_two_apart(tmp_path: Path) -> None:
    trace = trace_of()
    npz.save_program(trace.program, tmp_path / "program.npz")
    npz.save_trace(trace, tmp_path / "trace.npz")
    assert isinstance(npz.load(tmp_path / "program.npz"), Program)
    assert isinstance(npz.load(tmp_path / "trace.npz"), Trace)
    with pytest.raises(ValueError, match=r"program\.npz: holds a program without times, not a trace; load_program"):
        npz.load_trace(tmp_path / "program.npz")
    with pytest.raises(ValueError, match=r"trace\.npz: holds a trace, not a program; load_trace"):
        npz.load_program(tmp_path / "trace.npz")
