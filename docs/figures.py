"""The figures of the documentation that no single command draws: `python docs/figures.py kimi_k2.svg`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import treadle
from treadle.costs.costs import UNIT
from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes, Grid, cell_boxes
from treadle.view.figure import timeline
from treadle.view.frame import LEFT, end_of, put_about, put_title
from treadle.view.palette import Palette, palette
from treadle.view.panels import PANEL_NAMES, cell_panel, draw_panel
from treadle.view.parts import EXTRA, entries, legend, time_axis
from treadle.view.phases import Phase, pick_cell
from treadle.view.sheet import Scale, Sheet

HALF, QUARTER = UNIT.ticks // 2, UNIT.ticks // 4
LAYER_COSTS = treadle.Costs(
    "one layer",
    UNIT,
    cells={"f": 4 * HALF, "b": 6 * HALF, "fb": 6 * HALF},
    layer=dict.fromkeys(("attn_f", "mlp_f", "mlp_b", "attn_b", "mlp_w", "attn_w"), HALF)
    | dict.fromkeys(("dispatch_f", "combine_f", "combine_b", "dispatch_b"), HALF),
    message={"send": QUARTER, "offload": 3 * HALF, "onload": 3 * HALF},
    saved_bytes={"attn": 1, "mlp": 1},
)
"""Computing and all-to-alls take half a unit each: alone a forward is 2 and a backward 3, overlapped both are 3."""
LAYER_ABOUT = (
    "Assumed: attention, experts, their backward and weight halves and each all-to-all take 0.5, a message 0.25, "
    "a copy 1.5; so a forward alone takes 2, a backward alone 3, both together 3. In the rows of devices, messages "
    "take no time. Numbers are micro-batches."
)


def kimi_k2(path: Path) -> None:
    """Interleaved with overlap: what its three kinds of cells do on their lanes, above where they stand."""
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=8)
    options = treadle.LoweringOptions(layers=1, padded=True, offload=True, hold=False, early=False)
    lanes = treadle.simulate(treadle.lower(schedule, LAYER_COSTS, options), LAYER_COSTS)
    free = replace(LAYER_COSTS, message={})  # at this grain a message would not hide under a weight half
    cells = treadle.simulate(treadle.lower(schedule, free, treadle.LoweringOptions()), free)
    colours = palette("kimi")
    sheet = Sheet(640)
    put_title(sheet, "interleaved-overlap: 4 devices, 2 chunks each, 8 micro-batches")
    panels = _panels(sheet, lanes, colours)
    boxes = cell_boxes(cells, range(4), Grid(16, 1.5))
    scale = Scale(LEFT, 0, (sheet.width - LEFT - 12) / end_of(cells))
    sheet.y += 24
    scale = timeline(sheet, cells, boxes, colours, scale, by_lane=False)
    for which, (left, right, bottom) in panels.items():
        _connect(sheet, cells, boxes, scale, which, (left, right, bottom))
    time_axis(sheet, scale, end_of(cells), "unit")
    shown = [entry for which in panels for entry in entries(lanes, cell_panel(lanes, which), colours)]
    legend(sheet, LEFT, [*entries(cells, boxes, colours), EXTRA, *shown])
    put_about(sheet, LAYER_ABOUT, LEFT)
    sheet.save(path)


def _panels(sheet: Sheet, lanes: Trace, colours: Palette) -> dict[Phase, tuple[float, float, float]]:
    """The three panels side by side on one time scale; where each stands: left, right, bottom."""
    boxes = {which: cell_panel(lanes, which) for which in PANEL_NAMES}
    span = {which: float(b.right.max() - b.left.min()) for which, b in boxes.items()}
    left, gap = 74.0, 16.0
    per_unit = (sheet.width - left - 12 - 2 * gap) / sum(span.values())
    found: dict[Phase, tuple[float, float, float]] = {}
    for which, panel in boxes.items():
        right = left + span[which] * per_unit
        _, _, what = PANEL_NAMES[which].partition(": ")
        sheet.text((left + right) / 2, sheet.y + 6, what, size=7.5, across="center")
        scale = Scale(left, sheet.y + 15, per_unit, float(panel.left.min()))
        draw_panel(sheet, panel, colours, scale, named=not found)
        found[which] = (left, right, scale.top + panel.height)
        left = right + gap
    sheet.y = max(bottom for *_, bottom in found.values())
    return found


def _connect(
    sheet: Sheet, cells: Trace, boxes: Boxes, scale: Scale, which: Phase, panel: tuple[float, float, float]
) -> None:
    """Light lines from a panel to such a cell on the first device."""
    rank = 0
    cell = pick_cell(cells, which, rank)
    mine = (cells.program.cell[boxes.op] == cell) & (boxes.row == rank)
    corners = scale.corners(boxes)[mine]
    left, right, top = corners[:, 0].min(), corners[:, 2].max(), corners[:, 1].min()
    sheet.lines([[(panel[0], panel[2] + 2), (left, top)], [(panel[1], panel[2] + 2), (right, top)]], "#aaaaaa", 0.6)


FIGURES: dict[str, Callable[[Path], None]] = {"kimi_k2": kimi_k2}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        FIGURES[Path(name).stem](Path(name))
