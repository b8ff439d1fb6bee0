"""Figures of traces for papers: boxes of actions or of lanes over time, memory below, in SVG, PNG or PDF."""

from __future__ import annotations

from pathlib import Path

from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes, Grid, cell_boxes, lane_boxes
from treadle.view.comparison import compare_figure
from treadle.view.frame import (
    LEFT,
    LEFT_OF_LANES,
    NAME_WIDTH,
    RIGHT,
    Grain,
    checked_grain,
    checked_ranks,
    described,
    end_of,
    number_width,
    put_about,
    put_title,
    width_for,
)
from treadle.view.held import held, memory_unit
from treadle.view.palette import Palette, palette
from treadle.view.panels import PANEL_NAMES, cell_panel, draw_panel
from treadle.view.parts import (
    EXTRA,
    entries,
    legend,
    memory_strips,
    outline_extra,
    phase_brackets,
    row_names,
    time_axis,
)
from treadle.view.phases import Phase, extra_cells
from treadle.view.sheet import Scale, Sheet, checked_path, draw_boxes
from treadle.view.update_figure import draw_update


def draw(
    trace: Trace,
    path: str | Path,
    *,
    grain: Grain | None = None,
    memory: bool = False,
    palette_name: str = "kimi",
    title: str | None = None,
    ranks: range | None = None,
) -> None:
    """Draws a trace; the name's ending says the form. Without a grain, the trace's own."""
    if trace.program.layout.is_update:
        if grain is not None or memory:
            raise ValueError("a weight update is drawn by its buffers; leave the grain and the memory out")
        draw_update(trace, path, palette_name=palette_name, title=title, ranks=ranks)
        return
    target, colours = checked_path(path), palette(palette_name)
    by_lane = checked_grain(trace, grain) == "lanes"
    ranks, end = checked_ranks(trace, ranks), end_of(trace)
    boxes = lane_boxes(trace, ranks, Grid(13, 1, 8)) if by_lane else cell_boxes(trace, ranks)
    left = LEFT_OF_LANES if by_lane else LEFT
    sheet = Sheet(left + width_for(boxes, end, NAME_WIDTH if by_lane else number_width(boxes)) + RIGHT)
    put_title(sheet, title if title is not None else described(trace))
    scale = timeline(sheet, trace, boxes, colours, Scale(left, 0, (sheet.width - left - RIGHT) / end), by_lane=by_lane)
    if memory:
        unit = memory_unit(trace)
        memory_strips(sheet, held(trace, ranks, unit), scale, end, unit)
    time_axis(sheet, scale, end, trace.clock.unit)
    legend(sheet, left, [*entries(trace, boxes, colours), *([EXTRA] if extra_cells(trace) else [])])
    put_about(sheet, trace.about, left)
    sheet.save(target)


def draw_cell(
    trace: Trace, which: Phase, path: str | Path, *, palette_name: str = "kimi", title: str | None = None
) -> None:
    """Draws one cell's lanes: a lone forward, an overlapped cell or a lone backward, from the middle of the pipe."""
    target, colours = checked_path(path), palette(palette_name)
    boxes = cell_panel(trace, which)
    left, start = 74.0, float(boxes.left.min())
    span = float(boxes.right.max()) - start
    sheet = Sheet(left + width_for(boxes, span, 1.6 * NAME_WIDTH) + 12)
    put_title(sheet, title if title is not None else PANEL_NAMES[which])
    scale = Scale(left, sheet.y + 4, (sheet.width - left - 12) / span, start)
    draw_panel(sheet, boxes, colours, scale, named=True)
    sheet.y = scale.top + boxes.height
    time_axis(sheet, scale, span, trace.clock.unit)
    legend(sheet, left, entries(trace, boxes, colours))
    put_about(sheet, trace.about, left)
    sheet.save(target)


def timeline(sheet: Sheet, trace: Trace, boxes: Boxes, colours: Palette, scale: Scale, *, by_lane: bool) -> Scale:
    """Boxes with row names, their phases and the extra cell; moves down and says where it stands."""
    scale = Scale(scale.left, sheet.y + 16, scale.points_per_unit)
    draw_boxes(sheet, boxes, colours, scale)
    row_names(sheet, boxes, scale, by_lane=by_lane)
    phase_brackets(sheet, trace, boxes, scale)
    outline_extra(sheet, trace, boxes, scale)
    sheet.y = scale.top + boxes.height
    return scale


__all__ = ["compare_figure", "draw", "draw_cell", "timeline"]
