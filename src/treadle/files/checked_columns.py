"""Columns from outside: checked as a whole, so that all that reads a Program or a Trace can trust them.

Kernels follow pointers and look at no bounds: one that leads out of its column must stop here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.files.header import Timing, former_keys, layout_object
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import COLUMNS, NEVER, Layout, Longs, Program
from treadle.ir.trace import Trace

Column: TypeAlias = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "kind": np.dtype(np.uint8),
    "mb": np.dtype(np.int32),
    "chunk": np.dtype(np.int16),
    "layer": np.dtype(np.int16),
    "cell": np.dtype(np.int32),
    "launch": np.dtype(np.int32),
    "size_bytes": np.dtype(np.int64),
    "joined": np.dtype(np.bool_),
    "lane_ptr": np.dtype(np.int64),
    "lane_rank": np.dtype(np.int32),
    "lane_kind": np.dtype(np.uint8),
    "lane_peer": np.dtype(np.int32),
    "lane_group": np.dtype(np.int32),
    "dep_ptr": np.dtype(np.int64),
    "dep": np.dtype(np.int32),
    "start": np.dtype(np.int64),
    "end": np.dtype(np.int64),
}
"""The stored type of each column of a Program, and of the two more of a Trace."""

TIME_COLUMNS = ("start", "end")

LATEST = 2**60
"""Ticks from 0; far enough from the ends of int64 that sums and differences stay inside."""


def make_program(layout: Layout, columns: Mapping[str, Column], source: str) -> Program:
    """A Program of these columns, or a ValueError that names the file and the column."""
    program = Program(layout=layout, **{name: columns[name] for name in COLUMNS})
    check_program(program, source)
    return program


def make_trace(program: Program, columns: Mapping[str, Column], timing: Timing, source: str) -> Trace:
    """A Trace of a checked Program, or a ValueError that names the file and the column."""
    trace = Trace(program, columns["start"], columns["end"], *timing)
    check_times(trace, source)
    return trace


_MOST_ABSENT = 1000
"""How many times as many labels as ops a layout may name: all that reads a Program makes tables of its labels."""


def check_program(program: Program, source: str) -> None:
    """Types, lengths, pointers and the range of every number."""
    for name in COLUMNS:
        _check_type(name, getattr(program, name), source)
    num_ops, num_lanes = program.num_ops, program.num_lanes
    for name in ("mb", "chunk", "layer", "cell", "launch", "size_bytes", "joined"):
        _check_length(name, getattr(program, name), num_ops, "an entry for each op", source)
    for name in ("lane_kind", "lane_peer", "lane_group"):
        _check_length(name, getattr(program, name), num_lanes, "an entry for each lane", source)
    _check_pointer("lane_ptr", program.lane_ptr, num_lanes, num_ops, source)
    _check_pointer("dep_ptr", program.dep_ptr, num_ops, len(program.dep), source)
    for name, (low, high) in _limits(program).items():
        _check_range(name, getattr(program, name), low, high, source)
    layout = program.layout
    labels = layout.num_ranks * layout.placement.vpp * layout.num_mb * max(1, layout.max_layers)
    if labels > _MOST_ABSENT * (num_ops + _MOST_ABSENT):
        raise ValueError(
            f"{source}: its layout names {labels} layers over all ranks, chunks and micro-batches, and there are "
            f"{num_ops} ops; it is not the layout of these ops"
        )
    opens = program.lane_ptr[:-1][np.diff(program.lane_ptr) > 0]
    if program.joined[opens].any():
        op = int(opens[program.joined[opens]][0])
        raise ValueError(f"{source}: column 'joined' joins an op to the one before it on its lane; op {op} has none")


def check_times(trace: Trace, source: str) -> None:
    """A start and an end for each op, the end not before the start."""
    for name in TIME_COLUMNS:
        column = getattr(trace, name)
        _check_type(name, column, source)
        _check_length(name, column, trace.program.num_ops, "an entry for each op", source)
        _check_range(name, column, -LATEST, LATEST, source)
    early = np.flatnonzero(trace.end < trace.start)
    if len(early):
        op = int(early[0])
        raise ValueError(
            f"{source}: column 'end' is not before 'start', got {trace.end[op]} and {trace.start[op]} at op {op}"
        )


def reordered(ptr: Longs, values: Column, order: Longs) -> tuple[Longs, Column]:
    """Some entries of a compressed list, in this order."""
    count = ptr[order + 1] - ptr[order]
    taken = np.zeros(len(order) + 1, np.int64)
    np.cumsum(count, out=taken[1:])
    return taken, values[np.repeat(ptr[order] - taken[:-1], count) + np.arange(taken[-1])]


def fingerprint(program: Program, layout_keys: Collection[str] | None = None) -> str:
    """Return a digest that is equal for equal Programs only; it tells whether two files belong together.

    A file from before some key of the layout was added, or in place of another, has a digest of those that it has:
    `layout_keys`.
    """
    layout = layout_object(program.layout)
    if layout_keys is not None:
        known = {**layout, **former_keys(program.layout)}
        layout = {key: known[key] for key in layout_keys if key in known}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(layout, sort_keys=True).encode())
    for name in COLUMNS:
        column = getattr(program, name)
        digest.update(f"{name} {len(column)} ".encode())
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _limits(program: Program) -> dict[str, tuple[int, int]]:
    """The lowest and the highest value of each column.

    Micro-batches, chunks and layers that a layout has no place for are findings of the verifier, not of a parser.
    """
    last_rank, most = program.layout.num_ranks - 1, 2**63 - 1
    return {
        "kind": (0, len(OpKind) - 1),
        "mb": (NEVER, most),
        "chunk": (NEVER, most),
        "layer": (NEVER, most),
        "cell": (NEVER, most),
        "launch": (NEVER, most),
        "size_bytes": (0, most),
        "joined": (0, 1),
        "lane_rank": (0, last_rank),
        "lane_kind": (0, len(LaneKind) - 1),
        "lane_peer": (NEVER, last_rank),
        "lane_group": (NEVER, program.num_lanes - 1),
        "dep": (NEVER, program.num_ops - 1),
    }


def _check_type(name: str, column: Column, source: str) -> None:
    if column.dtype != DTYPES[name] or column.ndim != 1:
        came = f"{column.dtype}, {column.ndim} axes" if column.ndim != 1 else f"{column.dtype}"
        raise ValueError(f"{source}: column {name!r} is one axis of {DTYPES[name]}, got {came}")


def _check_length(name: str, column: Column, length: int, what: str, source: str) -> None:
    if len(column) != length:
        raise ValueError(f"{source}: column {name!r} has {what}, {length} in all, got {len(column)}")


def _check_pointer(name: str, pointer: Column, num: int, last: int, source: str) -> None:
    _check_length(name, pointer, num + 1, "one entry more than what it points from", source)
    if pointer[0] != 0 or pointer[-1] != last:
        raise ValueError(f"{source}: column {name!r} runs from 0 to {last}, got {pointer[0]} to {pointer[-1]}")
    falls = np.flatnonzero(pointer[1:] < pointer[:-1])  # a difference could wrap around
    if len(falls):
        place = int(falls[0])
        raise ValueError(
            f"{source}: column {name!r} never falls, got {pointer[place + 1]} after {pointer[place]} at {place}"
        )


def _check_range(name: str, column: Column, low: int, high: int, source: str) -> None:
    values = column.view(np.uint8) if column.dtype == np.bool_ else column  # a byte of a file may be 7
    if len(values) and not (low <= int(values.min()) and int(values.max()) <= high):
        place = int(np.flatnonzero((values < low) | (values > min(high, np.iinfo(values.dtype).max)))[0])
        limit = f" to {high}" if high < 2**63 - 1 else ""
        raise ValueError(f"{source}: column {name!r} has values from {low}{limit}, got {int(values[place])} at {place}")
