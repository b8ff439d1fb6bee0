"""The files of Programs and Traces: round trips, what damage does to them, what viewers need, and merging."""

from __future__ import annotations

import gzip
import io
import json
import random
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from treadle.costs import Costs, load_costs
from treadle.export import chrome, npz
from treadle.export.chrome import write
from treadle.export.columns import DTYPES, check_program
from treadle.export.header import layout_object
from treadle.ir import B, F, Placement, Schedule
from treadle.ir.program import COLUMNS, LaneKind, Layout, OpKind, Program
from treadle.ir.trace import Clock, Trace
from treadle.passes.cells import lower_cells
from treadle.schedules import SCHEDULES, generate
from treadle.simulate import simulate

SIZES = [(1, 1, 2), (2, 1, 4), (2, 2, 4), (4, 1, 8), (4, 2, 8)]
COSTS = ["unit", "deepseek-v3-h800"]


@cache
def costs(name: str) -> Costs:
    return load_costs(name)


def schedules() -> Iterator[Schedule]:
    """Every schedule at every size above that it can do."""
    for name in SCHEDULES:
        for pp, vpp, num_mb in SIZES:
            try:
                yield generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
            except ValueError:
                continue


EXAMPLES = list(schedules())


def size_id(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.pp}-{schedule.vpp}-{schedule.num_microbatches}"


def trace_of(name: str = "dualpipe", pp: int = 4, num_mb: int = 8, cost: str = "unit", slowness: float = 0.0) -> Trace:
    program = lower_cells(generate(name, pp=pp, microbatches=num_mb))
    return simulate(program, costs(cost), slowness=slowness)


def by_layers() -> Trace:
    """Two ranks, every kind of lane, and times that no other part of the project made: all that a file must carry."""
    kinds = [
        (OpKind.ATTN_F, OpKind.MLP_F),
        (OpKind.DISPATCH_F, OpKind.COMBINE_F),
        (OpKind.SEND_F,),
        (OpKind.OFFLOAD,),
        (OpKind.ONLOAD,),
        (OpKind.REDUCE_GRAD,),
        (OpKind.HOST,),
        (OpKind.ATTN_F, OpKind.MLP_F),
        (OpKind.RECV_F,),
        (OpKind.DISPATCH_F, OpKind.COMBINE_F),
    ]
    lanes = [LaneKind.COMPUTE, LaneKind.EP, LaneKind.SEND, LaneKind.OUT, LaneKind.IN, LaneKind.DP, LaneKind.HOST]
    lanes += [LaneKind.COMPUTE, LaneKind.RECV, LaneKind.EP]
    flat = [kind for row in kinds for kind in row]
    num = len(flat)
    parts = (OpKind.ATTN_F, OpKind.DISPATCH_F, OpKind.MLP_F, OpKind.COMBINE_F)
    saved = {OpKind.ATTN_F: 250_000_000, OpKind.MLP_F: 7}
    layout = Layout(Placement.loop(1), 3, (2,), parts, (OpKind.MLP_B,), (OpKind.MLP_W,), 2, 1, saved, 0.1)
    program = Program(
        layout=layout,
        kind=np.array(flat, np.uint8),
        mb=np.arange(num, dtype=np.int32) % 3,
        chunk=np.arange(num, dtype=np.int16) % 2,
        layer=np.arange(num, dtype=np.int16) % 2,
        cell=np.arange(num, dtype=np.int32) - 1,
        launch=np.arange(num, dtype=np.int32)[::-1] - 1,
        size_bytes=np.arange(num, dtype=np.int64) << 40,
        joined=np.arange(num) == 1,
        lane_ptr=np.r_[0, np.cumsum([len(row) for row in kinds])].astype(np.int64),
        lane_rank=np.array([0] * 7 + [1] * 3, np.int32),
        lane_kind=np.array(lanes, np.uint8),
        lane_peer=np.array([-1, -1, 1, -1, -1, -1, -1, -1, 0, -1], np.int32),
        lane_group=np.array([-1, 1, 0, -1, -1, -1, -1, -1, 0, 1], np.int32),
        dep_ptr=np.array([0, 2, 2, *range(3, num + 1)], np.int64),
        dep=np.array([-1, 5, *range(num - 2)], np.int32),
    )
    start = 1_700_000_000_000_000_007 // 2 + np.arange(num, dtype=np.int64) ** 3
    return Trace(program, start, start + np.arange(num), about='measured on "h3" — ünïcode\n\\', measured=True)


def assert_same_program(read: Program, written: Program) -> None:
    assert read.layout == written.layout
    for name in COLUMNS:
        mine, other = getattr(read, name), getattr(written, name)
        assert mine.dtype == other.dtype, name
        np.testing.assert_array_equal(mine, other, name)
        assert mine.flags.writeable, name
        assert mine.flags.c_contiguous, name


def assert_same_trace(read: Trace, written: Trace) -> None:
    assert_same_program(read.program, written.program)
    for name in ("start", "end"):
        assert getattr(read, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name), name)
    assert (read.clock, read.about, read.measured) == (written.clock, written.about, written.measured)


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


@pytest.mark.parametrize("clock", [Clock("us", 1000), Clock("ms", 10**6), Clock("unit", 720_720), Clock("step", 7)])
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


LONGEST_NS = 2**42 * 1000


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


def test_all_of_a_layout_and_a_program_is_written() -> None:
    """A field that is added must be added to the files."""
    layout = by_layers().program.layout
    assert list(layout_object(layout)) == [field.name for field in fields(Layout)]
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


@cache
def good_npz() -> bytes:
    stream = io.BytesIO()
    trace = trace_of("zb-v", 2, 4, "deepseek-v3-h800")
    arrays: dict[str, Any] = {name: getattr(trace.program, name) for name in COLUMNS}
    header = {
        "form": "treadle-trace",
        "version": 1,
        "layout": layout_object(trace.program.layout),
        "clock": {"unit": "us", "ticks": 1000},
        "about": "",
        "measured": False,
    }
    arrays |= {"start": trace.start, "end": trace.end, "treadle": np.array(json.dumps(header).encode())}
    np.savez(stream, **arrays)
    return stream.getvalue()


def changed_npz(path: Path, **changes: Any) -> Path:
    """The good file with other arrays; a function is given the one that is there, None takes it out."""
    with np.load(io.BytesIO(good_npz())) as good:
        arrays = {name: good[name] for name in good.files}
    for name, change in changes.items():
        arrays[name] = change(arrays[name].copy()) if callable(change) else change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def header(**changes: Any) -> Callable[[Any], Any]:
    """Changes keys of the JSON; `__` reaches inside."""

    def change(array: Any) -> Any:
        content = json.loads(array.item())
        for key, value in changes.items():
            inner, *path = content, *key.split("__")
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            if value is None:
                del inner[path[-1]]
        return np.array(json.dumps(content).encode())

    return change


def put(place: int, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[place] = value
        return array

    return change


def test_the_good_file_is_good(tmp_path: Path) -> None:
    assert isinstance(npz.load(changed_npz(tmp_path / "good.npz")), Trace)


NUM_OPS = 80
BAD_NPZ: list[tuple[dict[str, Any], str]] = [
    ({"mb": None}, "column 'mb' is missing from this treadle-trace"),
    ({"extra": np.zeros(3)}, r"'extra\.npy' is no column of a treadle-trace; take it out"),
    ({"treadle": None}, "an .npz file, but not of treadle: it has no array 'treadle'"),
    ({"treadle": np.zeros(3)}, r"array 'treadle' is one text, got float64 of shape \(3,\)"),
    ({"treadle": np.array(b"{")}, "array 'treadle' cannot be read: Expecting"),
    ({"treadle": np.array(b"\xff\xfe")}, "array 'treadle' cannot be read"),
    ({"treadle": np.array(b"[" * 100_000)}, "array 'treadle' cannot be read"),
    (
        {"treadle": np.array(b'{"version": 1, "version": 1}')},
        "array 'treadle' cannot be read: 'version' is given twice",
    ),
    ({"treadle": np.array(b"[1]")}, "treadle is an object, got a list of 1"),
    ({"treadle": header(version=2)}, "treadle.version is 1, the one that this treadle reads, got 2"),
    ({"treadle": header(version=True)}, "treadle.version is 1, .*got true"),
    ({"treadle": header(version=None)}, "treadle.version is 1, .*got null"),
    (
        {"treadle": header(form="treadle-plan")},
        r"treadle.form is what the file holds \(treadle-program, treadle-trace\), got 'treadle-plan'",
    ),
    ({"treadle": header(form=[])}, "treadle.form is .*got a list of 0"),
    ({"treadle": header(abuot="")}, "treadle has no key 'abuot'; did you mean 'about'?"),
    ({"treadle": header(measured=None)}, "treadle.measured is missing"),
    ({"treadle": header(measured=0)}, "treadle.measured is true or false, got 0"),
    ({"treadle": header(about=3)}, "treadle.about is a text, got 3"),
    ({"treadle": header(clock=3)}, "treadle.clock is an object, got 3"),
    ({"treadle": header(clock__ticks=0)}, "treadle.clock.ticks is a whole number from 1 to .*, got 0"),
    ({"treadle": header(clock__unit="a\nb")}, "treadle.clock.unit is a printable text, got"),
    ({"treadle": header(layout__kept=float("nan"))}, "array 'treadle' cannot be read: NaN is no number of JSON"),
    ({"treadle": header(layout__kept=1.5)}, "treadle.layout.kept is a number from 0 to 1, got 1.5"),
    ({"treadle": header(layout__ep=0)}, "treadle.layout.ep is a whole number from 1 to .*, got 0"),
    ({"treadle": header(layout__ep=2**30, layout__dp=2**30)}, "treadle.layout.ep is a size that makes at most"),
    (
        {"treadle": header(layout__num_mb=10**50)},
        "treadle.layout.num_mb is a whole .*, got a number of more than 40 digits",
    ),
    (
        {"treadle": header(layout__layers=[0])},
        "treadle.layout.layers is a number for each of the 4 stages, got a list of 1",
    ),
    (
        {"treadle": header(layout__layers=[0, 0, 0, 40_000])},
        r"treadle.layout.layers\[3\] is a whole number from 0 to 32767",
    ),
    (
        {"treadle": header(layout__forward=["F", "G"])},
        r"treadle.layout.forward\[1\] is a kind of op \(F, B, .*\), got 'G'",
    ),
    ({"treadle": header(layout__weights="W")}, "treadle.layout.weights is a list, got 'W'"),
    ({"treadle": header(layout__saved={"f": 1})}, "treadle.layout.saved has no key 'f'; "),
    ({"treadle": header(layout__saved={"F": -1})}, "treadle.layout.saved.F is a whole number from 0, got -1"),
    (
        {"treadle": header(layout__placement__pipes=[0, 10**9])},
        "treadle.layout.placement.pipes is a pipe for each of at most",
    ),
    ({"treadle": header(layout__placement__pipes=[])}, "treadle.layout.placement.pipes is a list of at least one"),
    ({"treadle": header(layout__placement__stages=[])}, "treadle.layout.placement: every rank .* as many stages"),
    ({"treadle": header(layout__placement__stages=[[0, 1], [2]])}, "every rank of a placement holds as many stages"),
    ({"treadle": header(layout__placement__stages=[[0, 3], [1, 1]])}, "a placement holds each stage from 0 to 3 once"),
    ({"treadle": header(layout__placement__stages=[[0, 3], 1])}, "treadle.layout.placement.stages.1 is a list, got 1"),
    (
        {"treadle": header(layout__placement__name="a\nb")},
        "treadle.layout.placement.name is one line of printable text",
    ),
    ({"mb": np.zeros(NUM_OPS, np.int64)}, r"column 'mb' is one axis of int32, got int64 of shape \(80,\)"),
    ({"mb": np.zeros(NUM_OPS, ">i4")}, "column 'mb' is one axis of int32, got >i4"),
    ({"mb": np.zeros((NUM_OPS, 1), np.int32)}, r"column 'mb' is one axis of int32, got int32 of shape \(80, 1\)"),
    ({"mb": np.array([{}] * NUM_OPS)}, "array 'mb' cannot be read: it holds Python objects, which are never unpickled"),
    ({"mb": lambda a: a[:-1]}, "column 'mb' has an entry for each op, 80 in all, got 79"),
    ({"end": lambda a: a[:-1]}, "column 'end' has an entry for each op, 80 in all, got 79"),
    ({"lane_peer": lambda a: a[1:]}, "column 'lane_peer' has an entry for each lane, 6 in all, got 5"),
    ({"lane_ptr": lambda a: a[1:]}, "column 'lane_ptr' has one entry more than what it points from, 7 in all, got 6"),
    ({"lane_ptr": put(0, 1)}, "column 'lane_ptr' runs from 0 to 80, got 1 to 80"),
    ({"lane_ptr": put(-1, 81)}, "column 'lane_ptr' runs from 0 to 80, got 0 to 81"),
    ({"lane_ptr": put(1, 50)}, "column 'lane_ptr' never falls, got .* after 50 at 1"),
    ({"dep_ptr": put(5, -(2**63))}, "column 'dep_ptr' never falls"),
    ({"dep_ptr": put(5, 2**63 - 1)}, "column 'dep_ptr' never falls"),
    ({"dep": put(3, NUM_OPS)}, "column 'dep' has values from -1 to 79, got 80 at 3"),
    ({"dep": put(3, -2)}, "column 'dep' has values from -1 to 79, got -2 at 3"),
    ({"kind": put(7, len(OpKind))}, f"column 'kind' has values from 0 to {len(OpKind) - 1}, got {len(OpKind)} at 7"),
    ({"lane_kind": put(0, 11)}, "column 'lane_kind' has values from 0 to 10, got 11 at 0"),
    ({"lane_rank": put(0, 2)}, "column 'lane_rank' has values from 0 to 1, got 2 at 0"),
    ({"lane_rank": put(0, -1)}, "column 'lane_rank' has values from 0 to 1, got -1 at 0"),
    ({"lane_peer": put(0, 2)}, "column 'lane_peer' has values from -1 to 1, got 2 at 0"),
    ({"lane_group": put(0, 2**31 - 1)}, "column 'lane_group' has values from -1 to 5, got 2147483647 at 0"),
    ({"mb": put(0, -2)}, "column 'mb' has values from -1, got -2 at 0"),
    ({"size_bytes": put(0, -1)}, "column 'size_bytes' has values from 0, got -1 at 0"),
    ({"joined": put(0, 1)}, "column 'joined' joins an op to the one before it on its lane; op 0 has none"),
    (
        {"joined": lambda a: np.full(NUM_OPS, 7, np.uint8).view(bool)},
        "column 'joined' has values from 0 to 1, got 7 at 0",
    ),
    ({"start": put(0, 2**62)}, "column 'start' has values from"),
    ({"start": put(9, 2**50)}, "column 'end' is not before 'start', got .* and 1125899906842624 at op 9"),
]


@pytest.mark.parametrize(("change", "message"), BAD_NPZ, ids=[message for _, message in BAD_NPZ])
def test_npz_errors_name_the_file_and_the_column(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = changed_npz(tmp_path / "mine.npz", **change)
    with pytest.raises(ValueError, match=f"mine.npz: .*{message}"):
        npz.load(path)


def test_a_bad_program_is_not_written(tmp_path: Path) -> None:
    trace = trace_of()
    wide = replace(trace.program, mb=trace.program.mb.astype(np.int64))
    with pytest.raises(ValueError, match=r"mine\.npz: column 'mb' is one axis of int32, got int64"):
        npz.save_program(wide, tmp_path / "mine.npz")
    with pytest.raises(ValueError, match=r"mine\.json: column 'end' is not before 'start'"):
        chrome.dump(replace(trace, end=trace.start - 1), tmp_path / "mine.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"PK", b"junk\n" * 99, b"\x93NUMPY\x01\x00", b"PK\x05\x06" + b"\0" * 18])
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.npz: "):
        npz.load(tmp_path / "mine.npz")


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """The good file with other bytes in it, and checksums to match."""
    with zipfile.ZipFile(io.BytesIO(good_npz())) as good, zipfile.ZipFile(path, "w", compression) as file:
        for name in good.namelist():
            file.writestr(name, change(name, good.read(name)))
    return path


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    """A few bytes could become any number."""
    path = rewritten(tmp_path / "mine.npz", lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"mine\.npz: array 'treadle' is compressed, or larger than the file"):
        npz.load(path)


@pytest.mark.parametrize("shape", [b"(10**15,)", b"(999999999999,)", b"(-80,)", b"(80,) ", b"(0,)", b"80", b"(81,)"])
def test_a_shape_that_the_bytes_do_not_have_is_refused(shape: bytes, tmp_path: Path) -> None:
    """Before anything of that size is asked for."""

    def lie(name: str, data: bytes) -> bytes:
        if name != "mb.npy":
            return data
        told = data[10:128].rstrip().replace(b"(80,)", shape)
        return data[:10] + told.ljust(117) + b"\n" + data[128:]

    path = rewritten(tmp_path / "mine.npz", lie)
    if shape == b"(80,) ":
        assert isinstance(npz.load(path), Trace)
        return
    with pytest.raises(ValueError, match=r"mine\.npz: array 'mb' cannot be read"):
        npz.load(path)


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "mine.npz", lambda _, data: data)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as file:
        file.writestr("mb.npy", b"")
    with pytest.raises(ValueError, match=r"mine\.npz: 'mb\.npy' is in the file twice"):
        npz.load(path)


def loads_equal_or_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    (path.parent / "good.npz").write_bytes(good_npz())
    try:
        read = npz.load(path)
    except ValueError as error:
        assert str(error).startswith(str(path)), error  # noqa: PT017 - either way is right
    else:
        good = npz.load(path.parent / "good.npz")
        assert isinstance(read, Trace)
        assert isinstance(good, Trace)
        assert_same_trace(read, good)


LENGTH = 11_000  # of good_npz, about; places are taken modulo


@given(st.lists(st.tuples(st.integers(0, 2 * LENGTH), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_do_not_get_through(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(good_npz())
    for place, mask in flips:
        content[place % len(content)] ^= mask
    loads_equal_or_is_refused(bytes(content), tmp_path / "mine.npz")


@given(st.lists(st.tuples(st.integers(0, 1800), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_of_the_directory_do_not_get_through(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    """The end of a zip file says where everything is."""
    content = bytearray(good_npz())
    for place, mask in flips:
        content[-1 - place % len(content)] ^= mask
    loads_equal_or_is_refused(bytes(content), tmp_path / "mine.npz")


@given(st.integers(0, LENGTH), st.binary(max_size=40))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_does_not_get_through(tmp_path: Path, length: int, tail: bytes) -> None:
    loads_equal_or_is_refused(good_npz()[: length % len(good_npz())] + tail, tmp_path / "mine.npz")


@given(st.sampled_from((*COLUMNS, "treadle", "start", "end")), st.integers(0, 4000), st.integers(1, 255))
@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_under_a_right_checksum_is_refused_or_sound(tmp_path: Path, name: str, place: int, mask: int) -> None:
    """A hostile file has right checksums: what loads has passed every check, and is not always what was written."""

    def flip(member: str, data: bytes) -> bytes:
        if member != f"{name}.npy":
            return data
        changed = bytearray(data)
        changed[place % len(data)] ^= mask
        return bytes(changed)

    path = rewritten(tmp_path / "mine.npz", flip)
    try:
        read = npz.load(path)
    except ValueError as error:
        assert str(error).startswith(str(path)), error  # noqa: PT017 - either way is right
    else:
        check_program(read.program if isinstance(read, Trace) else read, "what was read")


# Chrome traces: what viewers need


def content_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert isinstance(content, dict)
    return content


def events_of(path: Path) -> list[dict[str, Any]]:
    return list(content_of(path)["traceEvents"])


VIEWED = {
    "dualpipe": lambda: trace_of("dualpipe"),
    "zb-v real": lambda: trace_of("zb-v", 4, 8, "deepseek-v3-h800"),
    "slow": lambda: trace_of("1f1b", 4, 8, "deepseek-v3-h800", 0.3),
    "layers": by_layers,
}


@pytest.mark.parametrize("name", VIEWED)
def test_every_event_has_what_the_format_asks_for(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    assert content["displayTimeUnit"] in ("ms", "ns")
    keys = {
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"ph", "id", "name", "cat", "pid", "tid", "ts"},
        "f": {"ph", "bp", "id", "name", "cat", "pid", "tid", "ts"},
    }
    for event in content["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert list(event["args"]) == ["name" if event["name"].endswith("_name") else "sort_index"]
        else:
            assert set(event) == keys[event["ph"]]
            assert event["ts"] >= 0
        assert type(event["pid"]) is int
        assert event["pid"] >= 1, "viewers take process 0 for the kernel's"
    assert sum(event["ph"] == "X" for event in content["traceEvents"]) == trace.program.num_ops


@pytest.mark.parametrize("name", VIEWED)
def test_processes_are_ranks_and_threads_are_lanes(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {rank + 1: f"rank {rank}" for rank in range(trace.program.num_ranks)}
    threads = {e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    lanes = [trace.program.lane(lane) for lane in range(trace.program.num_lanes)]
    assert sorted(threads.values()) == sorted((lane.rank + 1, lane.name) for lane in lanes)
    assert not threads.keys() & processes.keys(), "a thread whose tid is its pid is a main thread to viewers"
    for event in events:
        if event["ph"] == "X":
            op = trace.program.op(event["args"]["index"])
            assert threads[event["tid"]] == (op.lane.rank + 1, op.lane.name)
            assert event["cat"] == op.lane.kind.name.lower()
            assert event["name"] == str(op).partition(" to rank")[0].partition(" from rank")[0]
            assert event["args"]["deps"] == trace.program.deps(op.index)


def test_threads_stand_in_the_order_a_person_reads(tmp_path: Path) -> None:
    chrome.dump(by_layers(), tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = [names[tid] for tid in sorted(names, key=lambda tid: places[tid])]
    assert order[:7] == ["compute", "ep", "send to rank 1", "out", "in", "dp", "host"]
    assert order[7:] == ["compute", "ep", "recv from rank 0"]
    assert sorted(places, key=lambda tid: places[tid]) == sorted(places), "viewers without sort_index go by tid"


@pytest.mark.parametrize("name", ["dualpipe", "zb-v real", "slow"])
def test_events_of_a_thread_do_not_overlap(name: str, tmp_path: Path) -> None:
    """But for the halves of an overlapped cell, which are drawn one under the other."""
    chrome.dump(VIEWED[name](), tmp_path / "trace.json")
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X" and not event["args"].get("joined"):
            start = round(event["ts"] * 1000)
            threads[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start


@pytest.mark.parametrize("name", VIEWED)
def test_arrows_join_sends_to_their_receives(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    arrows: dict[int, dict[str, int]] = defaultdict(dict)
    last: dict[int, dict[str, Any]] = {}
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X":
            last[event["tid"]] = event
        elif event["ph"] in "sf":
            span = last[event["tid"]]  # Perfetto binds an arrow to the event before it on its thread
            assert span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
            assert event["ph"] == "s" or "s" in arrows[event["id"]], "an arrow starts before it ends"
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = span["args"]["index"]
    assert all(set(ends) == {"s", "f"} for ends in arrows.values())
    kinds = trace.program.kind
    assert len(arrows) == np.isin(kinds, (OpKind.SEND_F, OpKind.SEND_B)).sum()
    for ends in arrows.values():
        send, receive = trace.program.op(ends["s"]), trace.program.op(ends["f"])
        assert send.kind.is_send
        assert receive.kind.is_recv
        assert (send.lane.rank, send.lane.peer) == (receive.lane.peer, receive.lane.rank)
        assert send.label == receive.label or name == "layers"


def test_units_are_whole_microseconds(tmp_path: Path) -> None:
    """What a person reads on the time axis of a schedule in units."""
    chrome.dump(trace_of("1f1b", 2, 2), tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    assert content["otherData"]["time"] == "1 unit is 1 us here"
    durations = {event["name"][0]: event["dur"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert durations["F"] == 1
    assert durations["B"] == 2
    assert content["treadle"]["clock"] == {"unit": "unit", "ticks": 720_720}


def test_nanoseconds_are_three_decimals(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 1, 1, "deepseek-v3-h800")
    chrome.dump(replace(trace, start=np.array([5, 1005]), end=np.array([1005, 3_000_006])), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"ts":0.000,"dur":1.000,' in text
    assert '"ts":1.000,"dur":2999.001,' in text


def test_receives_that_start_before_their_sends_have_their_arrow_where_both_run(tmp_path: Path) -> None:
    """Measured, a receive is posted early."""
    trace = trace_of("1f1b", 2, 2, "deepseek-v3-h800")
    recv = np.isin(trace.program.kind, (OpKind.RECV_F, OpKind.RECV_B))
    chrome.dump(replace(trace, start=np.where(recv, 0, trace.start)), tmp_path / "trace.json")
    ends = {(e["ph"], e["id"]): e["ts"] for e in events_of(tmp_path / "trace.json") if e["ph"] in "sf"}
    assert ends
    assert all(ends["s", name] == ends["f", name] > 0 for _, name in ends)


def test_gzip_and_streams(tmp_path: Path) -> None:
    trace, stream = trace_of(), io.StringIO()
    chrome.dump(trace, tmp_path / "trace.json")
    chrome.dump(trace, str(tmp_path / "trace.json.gz"))
    chrome.dump(trace, stream)
    text = (tmp_path / "trace.json").read_text()
    assert stream.getvalue() == text
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == text
    (tmp_path / "no_suffix").write_bytes((tmp_path / "trace.json.gz").read_bytes())
    assert_same_trace(chrome.load(tmp_path / "no_suffix"), trace)


def test_pieces_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of()
    chrome.dump(trace, tmp_path / "one.json")
    monkeypatch.setattr(write, "_PIECE", 7)
    chrome.dump(trace, tmp_path / "many.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "many.json").read_bytes()


# Chrome traces: reading


def save(content: object, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_events_may_come_in_any_order(tmp_path: Path) -> None:
    """As other tools leave them, which also write 5.000 as 5."""
    trace = trace_of(cost="deepseek-v3-h800")
    chrome.dump(trace, tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    random.Random(0).shuffle(content["traceEvents"])
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["dur"] == int(event["dur"]):
            event["dur"] = int(event["dur"])
    content = dict(reversed(content.items()))
    assert_same_trace(chrome.load(save(content, tmp_path / "other.json")), trace)


def event_with(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the fields of the n-th op's event; `args__` reaches inside, None takes a field out."""

    def change(content: dict[str, Any]) -> None:
        event = [event for event in content["traceEvents"] if event["ph"] == "X"][place]
        for key, value in changes.items():
            target = event["args"] if key.startswith("args__") else event
            name = key.removeprefix("args__")
            target[name] = value
            if value is None:
                del target[name]

    return change


def treadle_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["treadle"].update(changes)

    return change


def lane_with(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["treadle"]["lanes"][place].update(changes)

    return change


def without_event(content: dict[str, Any]) -> None:
    content["traceEvents"].remove(next(e for e in content["traceEvents"] if e.get("args", {}).get("index") == 5))


def event_again(content: dict[str, Any]) -> None:
    content["traceEvents"].append(next(e for e in content["traceEvents"] if e.get("args", {}).get("index") == 5))


def without_lane(content: dict[str, Any]) -> None:
    content["treadle"]["lanes"].pop()


BAD_JSON: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.pop("treadle"), "a JSON file, but no trace of treadle"),
    (lambda c: c.pop("traceEvents"), "the trace.traceEvents is missing"),
    (lambda c: c.update(more=1), "the trace has no key 'more'"),
    (lambda c: c.update(traceEvents={}), "the trace.traceEvents is a list, got an object"),
    (lambda c: c.update(treadle=[]), "treadle is an object, got a list of 0"),
    (treadle_with(version=2), "treadle.version is 1, the one that this treadle reads, got 2"),
    (treadle_with(origin=0.5), "treadle.origin is a whole number"),
    (treadle_with(ticks_per_us=0), "treadle.ticks_per_us is a whole number from 1"),
    (treadle_with(ticks_per_us=5), "ts is a number from 0 without decimals, got 0.0"),
    (treadle_with(num_ops=3), r"each op from 0 to 2 has an event, and one only, but op 3 has 1"),
    (treadle_with(num_ops=10**15), "each op from 0 to 999999999999999 has an event, and one only, but op 40 has 0"),
    (treadle_with(num_lanes=3), "each lane from 0 to 2 has an entry in treadle.lanes, and one only, but lane 3 has 1"),
    (
        treadle_with(program="0" * 32),
        "the events and lanes are not those of program 0{32}, which treadle.program names",
    ),
    (treadle_with(ranks=[1, 0]), "treadle.ranks is the first and the last rank of the file, got a list of 2"),
    (treadle_with(ranks=[0, 9]), r"treadle.ranks\[1\] is a whole number from 0 to 1, got 9"),
    (treadle_with(lanes=[3]), r"treadle.lanes\[0\] is an object, got 3"),
    (lane_with(0, kind="compute"), r"treadle.lanes\[0\].kind is a kind of lane \(COMPUTE, .*\), got 'compute'"),
    (lane_with(0, kind=[]), r"treadle.lanes\[0\].kind is a kind of lane .*, got a list of 0"),
    (lane_with(1, rank=5), r"treadle.lanes\[1\].rank is a whole number from 0 to 1, got 5"),
    (lane_with(1, tid=3), "treadle.lanes gives the tid 3 to two lanes"),
    (lane_with(1, peer=7), "column 'lane_peer' has values from -1 to 1, got 7"),
    (lane_with(1, group=1), "not those of program"),
    (lane_with(0, num_ops=99), "the num_ops of lane 0 do not end where the next lane begins"),
    (lane_with(0, first=99), "traceEvents.*op 0 is of no lane with pid 1 and tid 3 in treadle.lanes"),
    (without_lane, "is of no lane with"),
    (without_event, "each op from 0 to 39 has an event, and one only, but op 5 has 0"),
    (event_again, "each op from 0 to 39 has an event, and one only, but op 5 has 2"),
    (lambda c: c["traceEvents"].append(7), r"traceEvents\[\d+\] is an event of ph X, M, s or f, got 7"),
    (lambda c: c["traceEvents"].append({"ph": "C"}), r"traceEvents\[\d+\] is an event of ph .*, got ph 'C'"),
    (event_with(0, name=None), r"traceEvents\[\d+\]: an op has .*, got one without 'name'"),
    (event_with(0, more=1), r"traceEvents\[\d+\]: an op has .*, got one with 'more' too"),
    (event_with(0, args=[]), r"traceEvents\[\d+\]: args is an object, got a list of 0"),
    (event_with(0, args__mb=None), r"traceEvents\[\d+\]: args has .*, got one without 'mb'"),
    (event_with(0, args__more=1), r"traceEvents\[\d+\]: args has .*, got one with .* too"),
    (event_with(3, args__mb="3"), r"traceEvents\[\d+\]: args.mb is a whole number .*, got '3'"),
    (event_with(3, args__mb=3.0), r"traceEvents\[\d+\]: args.mb is a whole number .*, got 3.0"),
    (event_with(3, args__mb=True), r"traceEvents\[\d+\]: args.mb is a whole number .*, got true"),
    (event_with(3, args__chunk=2**15), r"args.chunk is a whole number from -32768 to 32767, got 32768"),
    (event_with(3, args__index=10**30), r"args.index is a whole number"),
    (event_with(3, args__index=-1), "op -1 is of no lane with pid 1"),
    (event_with(3, args__index=39), "op 39 is of no lane with pid 1"),
    (event_with(3, args__kind="G"), r"args.kind is a kind of op \(F, .*\), got 'G'"),
    (event_with(3, args__kind=["F"]), "args.kind is a kind of op .*, got a list of 1"),
    (event_with(3, args__joined=1), "args.joined is true or false, got 1"),
    (event_with(3, args__deps=3), "args.deps is a list, got 3"),
    (event_with(3, args__deps=[1, "2"]), "args.deps is a whole number .*, got '2'"),
    (event_with(3, args__deps=[99]), "column 'dep' has values from -1 to 39, got 99"),
    (event_with(3, args__mb=1, args__deps=[]), "not those of program"),
    (event_with(3, pid=2), "op 3 is of no lane with pid 2 and tid 3"),
    (event_with(3, tid=99), "op 3 is of no lane with pid 1 and tid 99"),
    (event_with(3, ts="0"), "ts is a number from 0 with at most three decimals, got '0'"),
    (event_with(3, ts=-1.0), "ts is a number from 0 with at most three decimals, got -1.0"),
    (event_with(3, ts=0.0005), "ts is a number from 0 with at most three decimals, got 0.0005"),
    (event_with(3, ts=1e300), "ts is a number from 0 with at most three decimals, got 1e"),
    (event_with(3, dur=True), "dur is a number from 0 with at most three decimals, got true"),
]


@cache
def good_json() -> str:
    stream = io.StringIO()
    chrome.dump(trace_of("1f1b", 2, 5, "deepseek-v3-h800"), stream)
    return stream.getvalue()


@pytest.mark.parametrize(("change", "message"), BAD_JSON, ids=[message for _, message in BAD_JSON])
def test_json_errors_name_the_place(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    content = json.loads(good_json())
    change(content)
    with pytest.raises(ValueError, match=f"mine.json: .*({message})"):
        chrome.load(save(content, tmp_path / "mine.json"))


def test_decimals_of_a_clock_that_has_none(tmp_path: Path) -> None:
    chrome.dump(trace_of("1f1b", 2, 5), tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    event_with(3, ts=1.5)(content)
    with pytest.raises(ValueError, match=r"ts is a number from 0 without decimals, got 1\.5"):
        chrome.load(save(content, tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON: "),
        ("[]", "the trace is an object, got a list of 0"),
        ("\xff", "not JSON: "),
        ("[" * 100_000, "nested deeper than any trace"),
        ('{"treadle": NaN}', "not JSON: NaN is no number of JSON"),
        ('{"treadle": 1, "treadle": 2}', "not JSON: 'treadle' is given twice in one object"),
        ('{"treadle": ' + "9" * 5000 + "}", "not JSON: "),
        ("\x1f\x8b\x08junk", "cannot be decompressed: "),
    ],
)
def test_files_that_are_no_traces(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        chrome.load(tmp_path / "mine.json")


@given(st.integers(0, 5000), st.one_of(st.none(), st.integers(1, 255)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_gzip_files_do_not_get_through(tmp_path: Path, place: int, mask: int | None) -> None:
    content = bytearray(gzip.compress(good_json().encode(), mtime=0))
    place %= len(content)
    if mask is None:
        del content[place:]
    else:
        content[place] ^= mask
    (tmp_path / "mine.json.gz").write_bytes(content)
    try:
        read = chrome.load(tmp_path / "mine.json.gz")
    except ValueError as error:
        assert "mine.json.gz: " in str(error)  # noqa: PT017 - either way is right
    else:
        assert_same_trace(read, trace_of("1f1b", 2, 5, "deepseek-v3-h800"))


@given(st.integers(0, 30_000), st.sampled_from(["9", "-", '"', "0", "}", "]", ",", "", ".5", "null", "e9", "x"]))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edited_json_is_a_trace_or_a_value_error(tmp_path: Path, place: int, text: str) -> None:
    """Names and arrows are not read back, and times are whatever they say; the program is the one that was written."""
    whole = good_json()
    place %= len(whole)
    (tmp_path / "mine.json").write_text(whole[:place] + text + whole[place + 1 :])
    try:
        read = chrome.load(tmp_path / "mine.json")
    except ValueError as error:
        assert "mine.json: " in str(error)  # noqa: PT017 - either way is right
    else:
        assert_same_program(read.program, trace_of("1f1b", 2, 5, "deepseek-v3-h800").program)


# Parts


def parts_of(trace: Trace, path: Path, *ends: int) -> list[Path]:
    """A file for each stretch of ranks between the ends."""
    paths = []
    for first, after in pairwise(ends):
        paths.append(path / f"ranks{first}.json")
        chrome.dump(trace, paths[-1], ranks=range(first, after))
    return paths


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_merge_to_the_whole(name: str, cost: str, tmp_path: Path) -> None:
    trace = trace_of(name, 4, 8, cost)
    paths = parts_of(trace, tmp_path, 0, 1, 3, 4)
    assert_same_trace(chrome.merge(reversed(paths)), trace)


def test_the_whole_is_a_part_too(tmp_path: Path) -> None:
    trace = trace_of()
    paths = parts_of(trace, tmp_path, 0, 4)
    assert "ranks" not in content_of(paths[0])["treadle"]
    assert_same_trace(chrome.merge(paths), trace)
    assert_same_trace(chrome.load(paths[0]), trace)


def test_each_rank_writes_its_own(tmp_path: Path) -> None:
    """As a runtime does: a rank knows its own times only, on a clock that starts where it starts."""
    trace = replace(trace_of(cost="deepseek-v3-h800"), measured=True)
    rank_of = trace.program.lane_rank[trace.program.lane_of]
    epoch = 850_000_000_123_456_789
    for rank in range(4):
        mine = rank_of == rank
        start, end = (np.where(mine, times + epoch, 0) for times in (trace.start, trace.end))
        here = replace(trace, start=start, end=end, about=f"measured on h{rank}")
        chrome.dump(here, tmp_path / f"{rank}.json.gz", ranks=range(rank, rank + 1))
    about = "; ".join(f"rank {rank}: measured on h{rank}" for rank in range(4))
    whole = replace(trace, start=trace.start + epoch, end=trace.end + epoch, about=about)
    assert_same_trace(chrome.merge(tmp_path / f"{rank}.json.gz" for rank in range(4)), whole)


def test_a_part_holds_its_ranks_only(tmp_path: Path) -> None:
    path = parts_of(trace_of(), tmp_path, 1, 3)[0]
    content = content_of(path)
    assert content["treadle"]["ranks"] == [1, 2]
    assert {lane["rank"] for lane in content["treadle"]["lanes"]} == {1, 2}
    assert {event["pid"] for event in content["traceEvents"]} == {2, 3}
    flows = [(event["id"], event["ph"]) for event in content["traceEvents"] if event["ph"] in "sf"]
    assert {name for name, phase in flows if phase == "s"} == {name for name, phase in flows if phase == "f"}


def test_threads_of_a_lane_are_the_same_in_all_parts(tmp_path: Path) -> None:
    trace = trace_of()
    paths = parts_of(trace, tmp_path, 0, 2, 4)
    chrome.dump(trace, tmp_path / "whole.json")
    tids = {lane["lane"]: lane["tid"] for path in paths for lane in content_of(path)["treadle"]["lanes"]}
    assert tids == {lane["lane"]: lane["tid"] for lane in content_of(tmp_path / "whole.json")["treadle"]["lanes"]}


def test_a_part_alone_is_refused(tmp_path: Path) -> None:
    paths = parts_of(trace_of(), tmp_path, 0, 1, 3, 4)
    with pytest.raises(
        ValueError, match=r"ranks0\.json: holds rank 0 of 4 only; merge it with the files of the others"
    ):
        chrome.load(paths[0])
    with pytest.raises(ValueError, match=r"ranks1\.json: holds ranks 1 to 2 of 4 only"):
        chrome.load(paths[1])


def test_merge_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    trace = trace_of()
    one, two, three = parts_of(trace, tmp_path, 0, 1, 3, 4)
    with pytest.raises(ValueError, match="no files to merge"):
        chrome.merge([])
    with pytest.raises(ValueError, match="none of the 2 files holds ranks 1 to 2 of 4; add the one that does"):
        chrome.merge([one, three])
    with pytest.raises(ValueError, match="none of the 2 files holds rank 3 of 4"):
        chrome.merge([one, two])
    with pytest.raises(ValueError, match="none of the 2 files holds rank 0 of 4"):
        chrome.merge([three, two])
    with pytest.raises(ValueError, match=r"rank 1 is in .*ranks1\.json and in .*ranks1\.json; leave one of them out"):
        chrome.merge([one, two, two, three])
    chrome.dump(trace, tmp_path / "whole.json")
    with pytest.raises(ValueError, match=r"rank 3 is in .*whole\.json and in .*ranks3\.json"):
        chrome.merge([three, tmp_path / "whole.json"])


def test_merge_refuses_other_programs_clocks_and_ways_to_know(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 2, 4)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    chrome.dump(trace, one, ranks=range(1))
    for other in (trace_of("gpipe", 2, 4), trace_of("1f1b", 2, 6), trace_of("1f1b", 4, 4)):
        chrome.dump(other, two, ranks=range(1, 2))
        with pytest.raises(
            ValueError, match=r"one\.json and .*two\.json are of different programs \(.*, and .*\); merge"
        ):
            chrome.merge([one, two])
    chrome.dump(replace(trace, clock=Clock("us", 1000)), two, ranks=range(1, 2))
    with pytest.raises(ValueError, match=r"one\.json and .*two\.json differ in clock \(.*unit.*us.*\)"):
        chrome.merge([one, two])
    chrome.dump(replace(trace, measured=True), two, ranks=range(1, 2))
    with pytest.raises(ValueError, match=r"one\.json and .*two\.json differ in measured \(False and True\)"):
        chrome.merge([one, two])


@pytest.mark.parametrize("ranks", [range(5), range(-1, 2), range(2, 2), range(0, 4, 2), range(3, 0, -1)])
def test_ranks_that_there_are_not(ranks: range, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks is a range of the 4 ranks such as range\(0, 4\), got range"):
        chrome.dump(trace_of(), tmp_path / "trace.json", ranks=ranks)
    assert not list(tmp_path.iterdir())


# Sizes


def test_more_ops_than_viewers_open_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chrome.MOST_OPS == 1_000_000
    trace = trace_of()
    monkeypatch.setattr(write, "MOST_OPS", trace.program.num_ops // 2)
    with pytest.raises(ValueError, match=r"170 ops are more than the 85 .*; write \.npz, or some ranks .* ranks="):
        chrome.dump(trace, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
    assert_same_trace(chrome.merge(parts_of(trace, tmp_path, 0, 1, 2, 3, 4)), trace)


def test_a_million_ops_and_one_are_refused(tmp_path: Path) -> None:
    num = chrome.MOST_OPS + 1
    program = trace_of("1f1b", 1, 1).program
    per_op = {"kind", "mb", "chunk", "layer", "cell", "launch", "size_bytes", "joined"}
    columns: dict[str, Any] = {name: np.zeros(num, DTYPES[name]) for name in per_op}
    columns |= {"lane_ptr": np.array([0, num]), "dep_ptr": np.zeros(num + 1, np.int64), "dep": np.empty(0, np.int32)}
    times = np.arange(num)
    with pytest.raises(ValueError, match="1,000,001 ops are more than the 1,000,000"):
        chrome.dump(Trace(replace(program, **columns), times, times + 1), tmp_path / "trace.json")


def test_a_span_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 1, 1, "deepseek-v3-h800")
    trace = replace(trace, start=np.array([0, 0]), end=np.array([0, LONGEST_NS + 1000]))
    with pytest.raises(ValueError, match=r"JSON holds times of up to 4,398,046,511,104 us exactly, .*; write \.npz"):
        chrome.dump(trace, tmp_path / "trace.json")


def test_speed(tmp_path: Path) -> None:
    """The goals are 2 s to write and 4 s to read 200,000 ops; the bounds leave room for a busy machine."""
    trace = trace_of("1f1b", 8, 4600, "deepseek-v3-h800")
    assert trace.program.num_ops > 200_000
    began = time.process_time()
    chrome.dump(trace, tmp_path / "trace.json")
    written = time.process_time()
    read = chrome.load(tmp_path / "trace.json")
    done = time.process_time()
    assert_same_trace(read, trace)
    assert written - began < 6
    assert done - written < 12
