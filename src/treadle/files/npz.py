"""The file form of a Program and of a Trace: `.npz`, columns as they are, and what they are of as JSON.

    treadle        {"form": "treadle-trace", "version": 1, "layout": {...}, "clock": {...}, ...}
    kind, mb, chunk, layer, cell, launch, size_bytes, joined                    an entry an op
    lane_ptr, lane_rank, lane_kind, lane_peer, lane_group                       an entry a lane (lane_ptr one more)
    dep_ptr, dep                                                                what the ops wait for
    start, end                                                                  of a Trace: ticks of its clock

Nothing is compressed, so ten million ops load as fast as a disk reads. Files come from anywhere: before an array is
made, its type and its size are held against the bytes that are there, and no object is ever unpickled.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from treadle.fields.fields import Fields, Object
from treadle.fields.input_files import parse_json
from treadle.fields.kinds import OneOf, shown
from treadle.files.checked_columns import (
    DTYPES,
    TIME_COLUMNS,
    Column,
    check_program,
    check_times,
    make_program,
    make_trace,
)
from treadle.files.header import (
    TIMING_KEYS,
    VERSION,
    check_version,
    layout_object,
    read_layout,
    read_timing,
    timing_object,
)
from treadle.ir.program import COLUMNS, Program
from treadle.ir.trace import Trace

HEADER = "treadle"
PROGRAM, TRACE = "treadle-program", "treadle-trace"

_KEYS = {PROGRAM: ("form", "version", "layout"), TRACE: ("form", "version", "layout", *TIMING_KEYS)}
_ARRAYS = {PROGRAM: COLUMNS, TRACE: (*COLUMNS, *TIME_COLUMNS)}


def save_program(program: Program, path: str | Path) -> None:
    """Write a Program that `load_program` reads back exactly."""
    check_program(program, str(path))
    _save(program, {}, {"form": PROGRAM}, path)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a Trace, its Program included, that `load_trace` reads back exactly."""
    check_program(trace.program, str(path))
    check_times(trace, str(path))
    times = {name: getattr(trace, name) for name in TIME_COLUMNS}
    _save(trace.program, times, {"form": TRACE, **timing_object(trace)}, path)


def load_program(path: str | Path) -> Program:
    """The Program of a file; a ValueError says what is wrong with it."""
    loaded = load(path)
    if isinstance(loaded, Trace):
        raise ValueError(f"{path}: holds a trace, not a program; load_trace reads it, and its program with it")
    return loaded


def load_trace(path: str | Path) -> Trace:
    """The Trace of a file; a ValueError says what is wrong with it."""
    loaded = load(path)
    if isinstance(loaded, Program):
        raise ValueError(f"{path}: holds a program without times, not a trace; load_program reads it")
    return loaded


def load(path: str | Path) -> Program | Trace:
    """Whichever of the two a file holds."""
    with Path(path).open("rb") as file:
        archive = _Archive.of(file, str(path))
        header = archive.header()
        form = header.text("form")
        archive.expect(form)
        layout = read_layout(header.inner("layout"))
        columns = {name: archive.array(name) for name in _ARRAYS[form]}
    program = make_program(layout, columns, str(path))
    if form == PROGRAM:
        return program
    return make_trace(program, columns, read_timing(header), str(path))


def _save(program: Program, times: dict[str, Any], header: Object, path: str | Path) -> None:
    text = json.dumps({**header, "version": VERSION, "layout": layout_object(program.layout)})
    arrays: dict[str, Any] = {HEADER: np.array(text.encode("ascii"))}
    arrays |= {name: getattr(program, name) for name in COLUMNS}
    with Path(path).open("wb") as file:  # given a name, numpy would add .npz to it
        np.savez(file, **arrays, **times)


@contextmanager
def _reading(source: str, what: str) -> Iterator[None]:
    """A ValueError for all that zipfile and numpy trip over in a broken file, from struct.error to MemoryError."""
    try:
        yield
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{source}: {what} cannot be read: {reason}; the file is cut short, damaged or foreign"
        ) from error


@dataclass(frozen=True)
class _Archive:
    """The zip file that an .npz is; every error starts with the source."""

    source: str
    file: zipfile.ZipFile
    size_bytes: int

    @classmethod
    def of(cls, file: IO[bytes], source: str) -> _Archive:
        with _reading(source, "the .npz file"):
            size_bytes = file.seek(0, 2)
            archive = zipfile.ZipFile(file)
        names = archive.namelist()
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{source}: {shown(twice)} is in the file twice; write it again")
        if f"{HEADER}.npy" not in names:
            raise ValueError(f"{source}: an .npz file, but not of treadle: it has no array {HEADER!r}")
        return cls(source, archive, size_bytes)

    def header(self) -> Fields:
        """Read the kind that the file says it has."""
        dtype, shape = self._announced(HEADER)
        if dtype.kind != "S" or shape != ():
            raise ValueError(f"{self.source}: array {HEADER!r} is one text, got {dtype} of shape {shape}")
        text = self._read(HEADER).item()
        with _reading(self.source, f"array {HEADER!r}"):
            content = parse_json(text)
        header = Fields.of(content, self.source, HEADER)
        check_version(header)
        header.expect(("form",), header.content)
        header.expect(_KEYS[header.get("form", OneOf(tuple(_KEYS), "what the file holds:"))])
        return header

    def expect(self, form: str) -> None:
        """Exactly the arrays of this form."""
        wanted = {f"{name}.npy" for name in (HEADER, *_ARRAYS[form])}
        names = set(self.file.namelist())
        for name in sorted(wanted - names):
            raise ValueError(f"{self.source}: column {name.removesuffix('.npy')!r} is missing from this {form}")
        for name in sorted(names - wanted):
            raise ValueError(f"{self.source}: {shown(name)} is no column of a {form}; take it out")

    def array(self, name: str) -> Column:
        """A column."""
        dtype, shape = self._announced(name)
        if dtype != DTYPES[name] or len(shape) != 1:
            raise ValueError(
                f"{self.source}: column {name!r} is one axis of {DTYPES[name]}, got {dtype} of shape {shape}"
            )
        return self._read(name)

    def _announced(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The type and shape of an array, if as many bytes are there as the two say."""
        info = self.file.getinfo(f"{name}.npy")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self.size_bytes:
            raise ValueError(
                f"{self.source}: array {name!r} is compressed, or larger than the file; arrays are stored as they are"
            )
        with _reading(self.source, f"array {name!r}"), self.file.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):
                raise ValueError(f"version {version} of numpy's format, treadle writes (1, 0)")
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.hasobject:
                raise ValueError("it holds Python objects, which are never unpickled")
            announced, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
            if announced != there:
                raise ValueError(f"{announced} bytes of data announced, {there} there")
            return dtype, shape

    def _read(self, name: str) -> Column:
        with _reading(self.source, f"array {name!r}"), self.file.open(f"{name}.npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)
