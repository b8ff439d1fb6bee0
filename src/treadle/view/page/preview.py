"""A step as a small picture in HTML: what ranks compute, coarsely.

It is the first picture of a trace's page: a browser paints it before it runs a script, so that a page that has just
been opened is never blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.trace import Trace
from treadle.view.palette import ROLE_OF, Palette

COLUMNS, MOST_RANKS = 480, 64
"""Columns of the picture, and rows of each trace: a few kB of text for the steps of papers."""

_ROW_PX = 41
"""Pixels from rank to rank, where there is room for them."""


def preview(traces: Sequence[Trace], colours: Palette) -> str:
    """HTML of the traces' compute lanes above each other."""
    rows = [(trace, lane) for trace in traces for lane in shown_lanes(trace)]
    names = [
        f'<span style="top: {100 * (y + 0.5) / len(rows):.4g}%">rank {int(trace.program.lane_rank[lane])}</span>'
        for y, (trace, lane) in enumerate(rows)
    ]
    shown = small_picture(rows, colours, max(trace.makespan for trace in traces)) + "".join(names)
    return f'<div id="preview" aria-hidden="true"><div style="height: {_ROW_PX * len(rows)}px">{shown}</div></div>'


def small_picture(rows: Sequence[tuple[Trace, int]], colours: Palette, end: int, columns: int = COLUMNS) -> str:
    """Return the SVG of lanes above each other, up to a time in ticks. Rows are 10 units high; it stretches."""
    shapes: dict[str, list[str]] = {}
    for y, (trace, lane) in enumerate(rows):
        for left, right, kind in _runs(trace, lane, max(1, end), columns):
            look = colours[ROLE_OF[OpKind(kind // 2)]]
            fill = look.of_later_chunk().fill if kind % 2 else look.fill
            shapes.setdefault(fill, []).append(f"M{left} {10 * y + 5}h{right - left}")
    paths = "".join(f'<path stroke="{fill}" d="{"".join(parts)}"/>' for fill, parts in shapes.items())
    box = f'viewBox="0 0 {columns} {10 * len(rows)}" preserveAspectRatio="none"'
    return f'<svg {box} fill="none" stroke-width="8">{paths}</svg>'


def shown_lanes(trace: Trace) -> list[int]:
    """Return the lanes that pages show of each rank even when folded."""
    kinds = (LaneKind.COMPUTE, LaneKind.BROADCAST)
    lanes: list[int] = np.flatnonzero(np.isin(trace.program.lane_kind, kinds))[:MOST_RANKS].tolist()
    return lanes


def _runs(trace: Trace, lane: int, end: int, columns: int) -> list[tuple[int, int, int]]:
    """Spans of columns with one kind of op: [left, right), and twice the kind, 1 more in later chunks."""
    program = trace.program
    ops = np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1])
    ops = ops[trace.end[ops] > trace.start[ops]]
    if not len(ops):
        return []
    origin = int(trace.start.min())
    middle = (np.arange(columns) + 0.5) * end / columns
    at = np.searchsorted(trace.start[ops] - origin, middle, side="right") - 1
    runs = np.where((at >= 0) & (trace.end[ops[np.maximum(at, 0)]] - origin > middle), at, -1)
    op = ops[np.maximum(runs, 0)]
    kind = np.where(runs >= 0, 2 * program.kind[op].astype(np.int64) + (program.chunk[op] > 0), -1)
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), columns]
    return [(left, right, int(kind[left])) for left, right in pairwise(edges) if kind[left] >= 0]
