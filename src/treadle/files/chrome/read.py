"""Chrome-trace JSON -> Part: the columns of the ranks that a file holds, each number checked as it comes."""

from __future__ import annotations

import gc
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from treadle.fields.fields import Fields
from treadle.fields.input_files import parse_json
from treadle.fields.kinds import OneOf
from treadle.files.checked_columns import LATEST, Column
from treadle.files.chrome.op_events import Ops
from treadle.files.chrome.scale import TickScale
from treadle.files.header import TIMING_KEYS, Timing, check_version, read_layout, read_timing
from treadle.ir.ops import LaneKind
from treadle.ir.program import Layout

MOST_BYTES = 2**31
"""Bytes of a file's text, to which a small .gz file may unpack; a million ops are about 250 MB."""

_TOP_KEYS = ("displayTimeUnit", "otherData", "treadle", "traceEvents")
_COUNT_KEYS = ("program", "num_ops", "num_lanes", "origin", "ticks_per_us")
_TREADLE_KEYS = ("version", "layout", *TIMING_KEYS, *_COUNT_KEYS, "lanes")
_LANE_KEYS = ("tid", "lane", "rank", "kind", "peer", "group", "first", "num_ops")
_LANE_KIND = OneOf(tuple(LaneKind.__members__), "a kind of lane:")
_PIECE_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class TracePart:
    """The part of a Trace that a file holds.

    `ops` and `lanes` have a column for each field; `ops["index"]` and `lanes["lane"]` say which of the Program's each
    entry is. `dep` has the `ops["num_deps"]` dependencies of each op, one behind the other. `steps` are the other
    steps of the run, as they came.
    """

    source: str
    layout: Layout
    layout_keys: frozenset[str]
    timing: Timing
    program: str
    num_ops: int
    num_lanes: int
    ranks: range
    ops: dict[str, Column]
    lanes: dict[str, Column]
    dep: Column
    steps: Fields | None = None

    @property
    def is_whole(self) -> bool:
        """True if the file holds all ranks."""
        return len(self.ranks) == self.layout.num_ranks


def read_part(path: str | Path) -> TracePart:
    """Read a file that `dump` wrote, whatever the order of its events; a ValueError says what is wrong with it."""
    with _uncollected():
        return _part(_parsed(Path(path), str(path)), str(path))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking a million new objects again and again: half of the time, measured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _part(value: object, source: str) -> TracePart:
    content = Fields(source, "", Fields.of(value, source, "the trace").content)
    if "treadle" not in content.content:
        raise ValueError(f"{source}: a JSON file, but no trace of treadle: it has no 'treadle' beside 'traceEvents'")
    content.expect(_TOP_KEYS)
    treadle = Fields.of(content.content["treadle"], source, "treadle")
    check_version(treadle)
    treadle.expect(_TREADLE_KEYS, ("ranks", "steps"))
    layout = read_layout(treadle.inner("layout"))
    ranks = _ranks(treadle, layout)
    lanes = _lanes(treadle, ranks)
    scale = TickScale(treadle.whole("origin", -LATEST, LATEST), treadle.whole("ticks_per_us", 1, 2**53))
    ops = Ops.of(content.listed("traceEvents"), source)
    ops.check_places(lanes)
    return TracePart(
        source=source,
        layout=layout,
        layout_keys=frozenset(treadle.inner("layout").content),
        timing=read_timing(treadle),
        program=treadle.text("program"),
        num_ops=treadle.whole("num_ops"),
        num_lanes=treadle.whole("num_lanes"),
        ranks=ranks,
        ops=ops.columns(scale),
        lanes=lanes,
        dep=ops.dep(),
        steps=treadle.inner("steps") if "steps" in treadle.content else None,
    )


def _parsed(path: Path, source: str) -> object:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzip else file
        data = _read(stream, source)
    try:
        return parse_json(data)
    except RecursionError:
        raise ValueError(f"{source}: nested deeper than any trace") from None
    except ValueError as error:
        raise ValueError(f"{source}: not JSON: {error}") from None


def _read(stream: IO[bytes], source: str) -> bytes:
    """All of a file, or a ValueError where it is broken or a little of it would become a lot."""
    data = bytearray()
    while len(data) <= MOST_BYTES:
        try:
            piece = stream.read(_PIECE_BYTES)
        except Exception as error:  # gzip has one for each way to be broken: zlib.error, EOFError, OSError
            raise ValueError(f"{source}: cannot be decompressed: {error}; the file is cut short or damaged") from error
        if not piece:
            return bytes(data)
        data += piece
    raise ValueError(f"{source}: a trace has at most {MOST_BYTES:,} bytes of JSON; write .npz for more")


def _ranks(treadle: Fields, layout: Layout) -> range:
    """The ranks that the file says it holds."""
    if "ranks" not in treadle.content:
        return range(layout.num_ranks)
    ends = treadle.wholes("ranks", 0, layout.num_ranks - 1)
    if len(ends) != 2 or ends[0] > ends[1]:
        raise treadle.error("ranks", "the first and the last rank of the file", list(ends))
    return range(ends[0], ends[1] + 1)


def _lanes(treadle: Fields, ranks: range) -> dict[str, Column]:
    """The lane table in columns, sorted by thread."""
    rows = [
        Fields.of(row, treadle.source, f"treadle.lanes[{place}]") for place, row in enumerate(treadle.listed("lanes"))
    ]
    for row in rows:
        row.expect(_LANE_KEYS)
    kinds = [LaneKind[row.get("kind", _LANE_KIND)] for row in rows]
    most = int(np.iinfo(np.int32).max)
    lowest = {"tid": 0, "lane": 0, "first": 0, "num_ops": 0, "peer": -1, "group": -1}
    table = {key: np.array([row.whole(key, low, most) for row in rows], np.int64) for key, low in lowest.items()}
    table["rank"] = np.array([row.whole("rank", ranks.start, ranks.stop - 1) for row in rows], np.int64)
    table["kind"] = np.array(kinds, np.int64)
    order = np.argsort(table["tid"], kind="stable")
    table = {key: column[order] for key, column in table.items()}
    twice = np.flatnonzero(np.diff(table["tid"]) == 0)
    if len(twice):
        raise ValueError(f"{treadle.source}: treadle.lanes gives the tid {table['tid'][twice[0]]} to two lanes")
    return table
