"""One cell's lanes, drawn large: what a rank computes, sends and copies while a forward, a backward or both run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes, BoxGrid, panel_boxes
from treadle.view.frame import Margins, checked_grain
from treadle.view.palette import Palette
from treadle.view.pipeline_phases import Phase, pick_cell
from treadle.view.sheet import Scale, Sheet, draw_boxes

PANEL_NAMES: dict[Phase, str] = {
    "warmup": "Warm-up: forward alone",
    "steady": "Steady: forward and backward overlapped",
    "cooldown": "Cool-down: backward alone",
}
_BAND = "#f3f3f3"


def middle_rank(trace: Trace) -> int:
    """A rank in the middle of the pipe, where messages go both ways."""
    layout = trace.program.layout
    return layout.placement.pp // 2 * layout.num_replicas


def cell_panel(trace: Trace, which: Phase) -> Boxes:
    """The boxes of one cell of a middle rank, from the middle of its phase; its time begins at 0."""
    if which not in PANEL_NAMES:
        raise ValueError(f"a cell to draw is {', '.join(PANEL_NAMES)}, got {which!r}")
    checked_grain(trace, "lanes")
    rank = middle_rank(trace)
    boxes = panel_boxes(trace, rank, pick_cell(trace, which, rank), BoxGrid(20, 3))
    start = float(boxes.left.min())
    return replace(boxes, left=boxes.left - start, right=boxes.right - start)


def draw_panel(sheet: Sheet, boxes: Boxes, colours: Palette, scale: Scale, margins: Margins) -> None:
    """The lanes as light bands with their boxes."""
    left, right = scale.left, scale.at(float(boxes.right.max()))
    for row in boxes.rows:
        band = np.array([[left, row.top], [right, row.top], [right, row.bottom], [left, row.bottom]])
        sheet.fill(band + np.array([0, scale.top]), _BAND)
        sheet.text(left - 5, scale.top + (row.top + row.bottom) / 2, margins.lane(row.name), size=7.5, across="right")
    draw_boxes(sheet, boxes, colours, scale)
