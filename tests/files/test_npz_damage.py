"""The .npz files of Programs and Traces: what damage does to them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.example_traces import (
    assert_same_trace,
    good_npz,
    header,
    trace_of,
)
from treadle.files import chrome, npz
from treadle.files.checked_columns import check_program
from treadle.ir.ops import OpKind
from treadle.ir.program import COLUMNS
from treadle.ir.trace import Trace


def changed_npz(path: Path, **changes: Any) -> Path:
    """The good file with other arrays; a function is given the one that is there, None takes it out."""
    with np.load(io.BytesIO(good_npz())) as good:
        arrays = {name: good[name] for name in good.files}
    for name, change in changes.items():
        arrays[name] = change(arrays[name].copy()) if callable(change) else change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


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
    ({"treadle": np.array(b"[1]")}, r"treadle is an object, got \[1\]"),
    ({"treadle": header(version=2)}, "treadle.version is 1, the one that this treadle reads, got 2"),
    ({"treadle": header(version=True)}, "treadle.version is 1, .*got true"),
    ({"treadle": header(version=None)}, "treadle.version is 1, .*got null"),
    (
        {"treadle": header(form="treadle-plan")},
        r"treadle.form is what the file holds: treadle-program, treadle-trace, got 'treadle-plan'",
    ),
    ({"treadle": header(form=[])}, "treadle.form is .*got a list of 0"),
    ({"treadle": header(abuot="")}, "treadle.abuot is not known; did you mean 'about'?"),
    ({"treadle": header(measured=None)}, "treadle.measured is missing"),
    ({"treadle": header(measured=0)}, "treadle.measured is true or false, got 0"),
    ({"treadle": header(about=3)}, "treadle.about is a text, got 3"),
    ({"treadle": header(clock=3)}, "treadle.clock is an object, got 3"),
    ({"treadle": header(clock__ticks=0)}, "treadle.clock.ticks is a whole number from 1 to .*, got 0"),
    ({"treadle": header(clock__unit="h")}, "treadle.clock.unit is one of ns, us, ms, s, unit, got 'h'"),
    ({"treadle": header(layout__kept=float("nan"))}, "array 'treadle' cannot be read: NaN is no number of JSON"),
    ({"treadle": header(layout__kept=1.5)}, "treadle.layout.kept is a number from 0 to 1, got 1.5"),
    ({"treadle": header(layout__ep=0)}, "treadle.layout.ep is a whole number from 1 to .*, got 0"),
    ({"treadle": header(layout__ep=2**30, layout__dp=2**30)}, "treadle.layout.ep is a size that makes at most"),
    (
        {"treadle": header(layout__num_mb=10**50)},
        "treadle.layout.num_mb is a whole .*, got a number of more than 40 digits",
    ),
    (
        {"treadle": header(layout__blocks=[""])},
        r"treadle.layout.blocks is a text for each of the 4 stages, got \[''\]",
    ),
    (
        {"treadle": header(layout__blocks=["t", "t", "t", "t" * 40_000])},
        "treadle.layout.blocks is at most 32767 blocks in a stage, got 40000",
    ),
    (
        {"treadle": header(layout__blocks=["t", "tE", "t", "t"])},
        "treadle.layout: stage 1: E in 'tE' is out of order",
    ),
    ({"treadle": header(layout__blocks=["", "t", "t", "t"])}, "treadle.layout: blocks are unknown for every stage"),
    ({"treadle": header(layout__layers=[0, 0, 0, 0])}, "treadle.layout.layers stands beside blocks"),
    ({"treadle": header(layout__num_mb=1_000_000)}, "its layout names .* micro-batches, and there are .* ops"),
    ({"treadle": header(layout__tied=[[0, 7]])}, r"treadle.layout: a tie is two or more different stages from 0 to 3"),
    ({"treadle": header(layout__tied=[1])}, r"treadle.layout.tied\[0\] is a list of at least 1, .*, got 1"),
    (
        {"treadle": header(layout__step_end=["CLIP"])},
        "treadle.layout: a step ends with these in order, OPTIMIZER among them: ",
    ),
    (
        {"treadle": header(layout__mb_scale=[1.0, 0.0])},
        r"treadle.layout.mb_scale\[1\] is a number above 0, below 1e\+12, got 0.0",
    ),
    (
        {"treadle": header(layout__mb_scale=[1.0])},
        "treadle.layout: mb_scale has a number for each of 4, or none, got 1",
    ),
    (
        {"treadle": header(layout__forward=["F", "G"])},
        r"treadle.layout.forward\[1\] is a kind of op: F, B, .*, got 'G'",
    ),
    ({"treadle": header(layout__weights="W")}, "treadle.layout.weights is a list, .*, got 'W'"),
    ({"treadle": header(layout__saved={"f": 1})}, "treadle.layout.saved.f is not known; did you mean 'F'?"),
    ({"treadle": header(layout__saved={"F": -1})}, "treadle.layout.saved.F is a whole number from 0, got -1"),
    (
        {"treadle": header(layout__placement__pipes=[0, 10**9])},
        "treadle.layout.placement.pipes is a pipe for each of at most",
    ),
    ({"treadle": header(layout__placement__pipes=[])}, "treadle.layout.placement.pipes is a list of at least 1"),
    (
        {"treadle": header(layout__placement__stages=[])},
        "treadle.layout.placement: a placement has 1 or more ranks, got 0",
    ),
    ({"treadle": header(layout__placement__stages=[[0, 1], [2]])}, "every rank of a placement holds as many stages"),
    ({"treadle": header(layout__placement__stages=[[0, 3], [1, 1]])}, "a placement holds each stage from 0 to 3 once"),
    (
        {"treadle": header(layout__placement__stages=[[0, 3], 1])},
        r"treadle.layout.placement.stages\[1\] is a list of at least 1, .*, got 1",
    ),
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
    ({"lane_kind": put(0, 14)}, "column 'lane_kind' has values from 0 to 13, got 14 at 0"),
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


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2 * LENGTH), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_do_not_get_through(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(good_npz())
    for place, mask in flips:
        content[place % len(content)] ^= mask
    loads_equal_or_is_refused(bytes(content), tmp_path / "mine.npz")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1800), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_of_the_directory_do_not_get_through(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    """The end of a zip file says where everything is."""
    content = bytearray(good_npz())
    for place, mask in flips:
        content[-1 - place % len(content)] ^= mask
    loads_equal_or_is_refused(bytes(content), tmp_path / "mine.npz")


@given(st.integers(0, LENGTH), st.binary(max_size=40))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_does_not_get_through(tmp_path: Path, length: int, tail: bytes) -> None:
    loads_equal_or_is_refused(good_npz()[: length % len(good_npz())] + tail, tmp_path / "mine.npz")


@pytest.mark.slow
@given(st.sampled_from((*COLUMNS, "treadle", "start", "end")), st.integers(0, 4000), st.integers(1, 255))
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
