"""The boxes of a figure as data: one for each op, with its times, its row and its texts. Nothing here draws.

Across, a box is in units of the trace's clock, from the trace's first start; down, in points from the top of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import COPIES, RECEIVES, LaneKind, OpKind
from treadle.ir.program import Longs
from treadle.ir.trace import Trace
from treadle.view.palette import NAMES, ROLE_OF, Role

Floats: TypeAlias = npt.NDArray[np.float64]
Texts: TypeAlias = npt.NDArray[Any]

FORWARD_SHARE = 1 / 3
"""Of an overlapped cell's width: its two actions run together, so the split means nothing; drawn as published."""

ROLES = tuple(Role)
_ROLE = np.array([ROLES.index(ROLE_OF[kind]) for kind in OpKind])

LANE_ROWS: tuple[tuple[str, tuple[LaneKind, ...]], ...] = (
    ("Computation", (LaneKind.COMPUTE,)),
    ("Communication", (LaneKind.EP, LaneKind.SEND, LaneKind.DP, LaneKind.TP, LaneKind.TIED, LaneKind.WORLD)),
    ("Offload", (LaneKind.OUT, LaneKind.IN)),
    ("Host", (LaneKind.HOST,)),
)
"""A message is drawn where it is sent: its receive has the same times."""

_COPIES = (LaneKind.OUT, LaneKind.IN)
_NOT_ITS_OWN = (*COPIES, *RECEIVES)


@dataclass(frozen=True)
class Row:
    """A named band of boxes."""

    name: str
    rank: int
    top: float
    bottom: float


@dataclass(frozen=True, eq=False)
class Boxes:
    """Columns over boxes. `role` indexes ROLES, `later` marks chunks after the first, `says` are texts, best first."""

    op: Longs
    row: Longs
    left: Floats
    right: Floats
    top: Floats
    bottom: Floats
    role: Longs
    later: npt.NDArray[np.bool_]
    says: tuple[Texts, ...]
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.op)

    def some(self, chosen: npt.NDArray[np.bool_]) -> Boxes:
        """The boxes that are chosen, in the same rows."""
        columns = ("op", "row", "left", "right", "top", "bottom", "role", "later")
        texts = tuple(text[chosen] for text in self.says)
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns}, says=texts)

    @property
    def height(self) -> float:
        """Height of the block, in points."""
        return max((row.bottom for row in self.rows), default=0.0)


@dataclass(frozen=True)
class BoxGrid:
    """Heights of rows and the gaps between them, in points."""

    track: float = 15.0
    gap: float = 1.5
    device_gap: float = 0.0


GRID = BoxGrid()


def cell_boxes(trace: Trace, ranks: range, grid: BoxGrid = GRID) -> Boxes:
    """One row a rank, one box an action; the two actions of an overlapped cell share its time, forward left."""
    program = trace.program
    rank = program.lane_rank[program.lane_of]
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    op = np.flatnonzero(compute & np.isin(rank, ranks) & (trace.end > trace.start))
    left, right = _units(trace, op)
    second = program.joined[op]
    first = np.r_[second[1:], False] & ~second if len(op) else second
    middle = left + (right - left) * FORWARD_SHARE
    row = np.searchsorted(np.array(ranks), rank[op])
    pitch = grid.track + grid.gap
    top: Floats = row.astype(np.float64) * pitch
    rows = [Row(f"Device {r}", r, i * pitch, i * pitch + grid.track) for i, r in enumerate(ranks)]
    return Boxes(
        op,
        row,
        np.where(second, middle, left),
        np.where(first, middle, right),
        top,
        top + grid.track,
        _ROLE[program.kind[op]],
        program.chunk[op] > 0,
        _numbers(trace, op),
        tuple(rows),
    )


def lane_boxes(trace: Trace, ranks: range, grid: BoxGrid = GRID) -> Boxes:
    """Return each rank's rows of lanes: computation, communication, copies, and the host where it takes time."""
    blocks, y = [], 0.0
    for rank in ranks:
        blocks += list(_device_rows(trace, rank, grid, y, cell=None))
        y = blocks[-1][0].bottom + grid.device_gap if blocks else y
    return _gather(trace, blocks, numbered=True)


def panel_boxes(trace: Trace, rank: int, cell: int, grid: BoxGrid = GRID) -> Boxes:
    """Make the boxes of one cell on its lanes, with the copies that run meanwhile; always the same three rows."""
    return _gather(trace, list(_device_rows(trace, rank, grid, 0.0, cell=cell)), numbered=False)


_Band: TypeAlias = tuple[Longs, float, float]
_Block: TypeAlias = tuple[Row, list[_Band]]


def _device_rows(trace: Trace, rank: int, grid: BoxGrid, y: float, *, cell: int | None) -> Iterator[_Block]:
    """The rows of a device that have anything in them, each with its tracks; of one cell all of them, equally high."""
    for name, kinds in LANE_ROWS:
        tracks = _tracks(trace, _lanes(trace, rank, kinds, cell))
        if not tracks and (cell is None or name == "Host"):
            continue
        bands = list(_stacked(tracks, grid.track, y) if cell is None else _shared(trace, tracks, grid.track, y))
        bottom = y + grid.track * (len(tracks) if cell is None else 1)
        yield Row(name, rank, y, bottom), bands
        y = bottom + grid.gap


def _stacked(tracks: list[Longs], high: float, y: float) -> Iterator[_Band]:
    """Tracks above each other, each of full height."""
    return ((ops, y + high * i, y + high * (i + 1)) for i, ops in enumerate(tracks))


def _shared(trace: Trace, tracks: list[Longs], high: float, y: float) -> Iterator[_Band]:
    """Tracks in one height, shared only where and while ops of several run at once."""
    if not tracks:
        return
    op = np.concatenate(tracks)
    track = np.repeat(np.arange(len(tracks)), [len(ops) for ops in tracks])
    order = np.argsort(trace.start[op], kind="stable")
    op, track = op[order], track[order]
    opens = np.r_[True, trace.start[op[1:]] >= np.maximum.accumulate(trace.end[op])[:-1]]
    for cluster in np.split(np.arange(len(op)), np.flatnonzero(opens)[1:]):
        used, place = np.unique(track[cluster], return_inverse=True)
        part = high / len(used)
        for i, index in zip(place, cluster, strict=True):
            yield op[index : index + 1], y + part * float(i), y + part * float(i + 1)


def _lanes(trace: Trace, rank: int, kinds: Iterable[LaneKind], cell: int | None) -> Iterator[Longs]:
    """The ops of a rank's lanes of these kinds that take time, lane by lane."""
    program = trace.program
    mine = np.flatnonzero(program.lane_rank == rank)
    for kind in kinds:
        for lane in mine[program.lane_kind[mine] == kind]:
            ops = np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1])
            ops = ops[trace.end[ops] > trace.start[ops]]
            if cell is not None:
                ops = ops[_meanwhile(trace, rank, cell, ops) if kind in _COPIES else program.cell[ops] == cell]
            if len(ops):
                yield ops


def _meanwhile(trace: Trace, rank: int, cell: int, copies: Longs) -> npt.NDArray[np.bool_]:
    """The copies that run for half of their time or more while the cell does: many a one starts a cell earlier."""
    program = trace.program
    rank_of = program.lane_rank[program.lane_of]
    mine = np.flatnonzero((rank_of == rank) & (program.cell == cell) & ~np.isin(program.kind, _NOT_ITS_OWN))
    begin, stop = int(trace.start[mine].min()), int(trace.end[mine].max())
    inside = np.minimum(trace.end[copies], stop) - np.maximum(trace.start[copies], begin)
    return 2 * inside >= trace.end[copies] - trace.start[copies]


def _tracks(trace: Trace, lanes: Iterable[Longs]) -> list[Longs]:
    """Lanes of one row, above each other only where their ops would overlap."""
    tracks: list[Longs] = []
    for ops in lanes:
        for i, track in enumerate(tracks):
            both = np.r_[track, ops]
            both = both[np.argsort(trace.start[both], kind="stable")]
            if (trace.end[both[:-1]] <= trace.start[both[1:]]).all():
                tracks[i] = both
                break
        else:
            tracks.append(ops)
    return tracks


def _gather(trace: Trace, blocks: list[_Block], *, numbered: bool) -> Boxes:
    program = trace.program
    pieces = [(i, ops, top, bottom) for i, (_, tracks) in enumerate(blocks) for ops, top, bottom in tracks]
    op = np.concatenate([np.zeros(0, np.int64), *(ops for _, ops, _, _ in pieces)])
    size = [len(ops) for _, ops, _, _ in pieces]
    left, right = _units(trace, op)
    name = np.array([NAMES[kind] for kind in OpKind], object)[program.kind[op]]
    says: tuple[Texts, ...] = (name,)
    if numbered:
        number = " " + program.mb[op].astype(str).astype(object)
        says = (np.where(program.mb[op] >= 0, name + number, name), name)
    return Boxes(
        op,
        np.repeat([i for i, *_ in pieces], size).astype(np.int64),
        left,
        right,
        np.repeat([top for *_, top, _ in pieces], size).astype(float),
        np.repeat([bottom for *_, bottom in pieces], size).astype(float),
        _ROLE[program.kind[op]],
        (program.chunk[op] > 0) & numbered,
        says,
        tuple(row for row, _ in blocks),
    )


def _units(trace: Trace, op: Longs) -> tuple[Floats, Floats]:
    origin = int(trace.start.min()) if len(trace.start) else 0
    return (trace.start[op] - origin) / trace.clock.ticks, (trace.end[op] - origin) / trace.clock.ticks


def _numbers(trace: Trace, op: Longs) -> tuple[Texts, ...]:
    """The micro-batch; with more than two chunks, which colours do not separate, the chunk after a dot."""
    program = trace.program
    ends = program.mb[op] < 0  # what a rank does once a step
    number = np.where(ends, "", program.mb[op].astype(str).astype(object))
    if program.layout.placement.vpp <= 2:
        return (number,)
    return (np.where(ends, "", number + "." + program.chunk[op].astype(str).astype(object)),)
