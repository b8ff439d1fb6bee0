"""Figures of traces for papers: boxes of actions or of lanes over time, memory below, in SVG, PNG or PDF.

Several traces are panels above each other on one time axis. A long step is cut into strips of time below each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.ir.trace import Trace
from treadle.view.box_text import fit
from treadle.view.boxes import Boxes, BoxGrid, cell_boxes, lane_boxes
from treadle.view.described import described
from treadle.view.figure_parts import (
    EXTRA,
    Entry,
    entries,
    heading,
    legend,
    memory_lines,
    memory_strips,
    outline_extra,
    phase_brackets,
    row_names,
    time_axis,
)
from treadle.view.frame import (
    NAME_WIDTH,
    Margins,
    checked_grain,
    checked_ranks,
    layout,
    natural_width,
    number_width,
    put_about,
    put_title,
)
from treadle.view.hang import Hang
from treadle.view.hang_figure import GRID, named, put_waiting, waiting_entries
from treadle.view.memory_curves import Held, MemoryUnit, held, memory_unit
from treadle.view.palette import Palette, palette
from treadle.view.panels import PANEL_NAMES, cell_panel, draw_panel
from treadle.view.pipeline_phases import Phase, extra_cells
from treadle.view.sheet import FigureSize, Scale, Sheet, draw_boxes, label_sizes
from treadle.view.style import FigureStyle, checked_path
from treadle.view.update_figure import update_sheet
from treadle.view.window import Window, checked_window, end_of, strips, within

PLAIN = FigureStyle()

_BOX_WIDTH = 11.5
"""Points of a usual short box: its number with air around it."""


@dataclass(frozen=True)
class FigureContent:
    """What a figure shows of its traces: their grain, their own if None; memory; some ranks; a window of time."""

    grain: str | None = None
    memory: bool = False
    ranks: range | None = None
    window: Window | None = None


WHOLE = FigureContent()


def draw(
    traces: Trace | Sequence[Trace],
    path: str | Path,
    content: FigureContent = WHOLE,
    style: FigureStyle = PLAIN,
    *,
    names: Sequence[str] = (),
    hangs: Sequence[Hang | None] = (),
) -> FigureSize:
    """Draw a trace, or several above each other, each under its name; the path's ending says the form.

    A trace of a step that does not finish has a `Hang`.
    """
    target = checked_path(path)
    given = [traces] if isinstance(traces, Trace) else traces
    return sheet_of(given, content, style, names=names, hangs=hangs).save(target)


def draw_cell(trace: Trace, which: Phase, path: str | Path, style: FigureStyle = PLAIN) -> FigureSize:
    """Draw one cell's lanes: a lone forward, an overlapped cell or a lone backward, from the middle of the pipe."""
    target = checked_path(path)
    return cell_sheet(trace, which, style).save(target)


def sheet_of(
    traces: Sequence[Trace],
    content: FigureContent = WHOLE,
    style: FigureStyle = PLAIN,
    *,
    names: Sequence[str] = (),
    hangs: Sequence[Hang | None] = (),
) -> Sheet:
    """The figure of traces, before it is written."""
    if not traces:
        raise ValueError("a figure needs at least one trace, got none")
    if any(trace.program.layout.is_update for trace in traces):
        return _of_update(traces, content, style)
    if len({trace.clock for trace in traces}) > 1:
        units = ", ".join(dict.fromkeys(trace.clock.unit for trace in traces))
        raise ValueError(f"traces on one time axis need one unit of time, got {units}; simulate with other costs")
    window = checked_window(traces, content.window)
    colours = palette(style.palette)
    compact = len(traces) > 1 or (style.layout_width is not None and style.layout_width < 380)
    stops = hangs if hangs else [None] * len(traces)
    found = [_panel(trace, hang, content, window, compact) for trace, hang in zip(traces, stops, strict=True)]
    panels = [replace(panel, name=name) for panel, name in zip(found, names, strict=True)] if names else found
    return _timeline(panels, content, style, window, colours)


@dataclass(frozen=True, eq=False)
class _Panel:
    """One trace of a figure: its boxes within the window, and its memory if that is drawn."""

    name: str
    trace: Trace
    hang: Hang | None
    boxes: Boxes
    by_lane: bool
    curves: list[Held]
    unit: MemoryUnit

    def box_width(self, size: float | None = None) -> float:
        """Return the points that a usual short box has for its label, or that it needs in letters of a size."""
        if self.by_lane:
            return NAME_WIDTH
        boxes = self.boxes if self.hang is None else named(self.boxes, self.trace)
        return max(_BOX_WIDTH, number_width(boxes)) if size is None else number_width(boxes, size)

    @property
    def peak(self) -> float:
        return max((curve.peak for curve in self.curves), default=0.0)

    @property
    def facts(self) -> str:
        if self.hang is not None:
            return "does not finish"
        end, unit = end_of(self.trace), self.trace.clock.unit
        took = f"{end / 1000:,.1f} ms" if unit == "us" else f"{end:g} {'units' if unit == 'unit' else unit}"
        return took + (f", at most {self.unit.show(self.peak)} {self.unit.name} held" if self.curves else "")

    @property
    def has_extra(self) -> bool:
        """True if it shows an extra warm-up cell."""
        if self.hang is not None:
            return False
        rank = self.trace.program.lane_rank[self.trace.program.lane_of[self.boxes.op]]
        cell = self.trace.program.cell[self.boxes.op]
        return any(bool(((rank == r) & (cell == extra)).any()) for r, extra in extra_cells(self.trace).items())

    def entries(self, colours: Palette) -> list[Entry]:
        """The legend's entries."""
        if self.hang is None:
            return entries(self.trace, self.boxes, colours)
        ran = self.boxes.some(~self.hang.waiting[self.boxes.op])
        return [*entries(self.trace, ran, colours), *waiting_entries(self.boxes, self.hang)]


def _panel(trace: Trace, hang: Hang | None, content: FigureContent, window: Window, compact: bool) -> _Panel:
    by_lane = checked_grain(trace, content.grain) == "lanes"
    ranks = checked_ranks(trace, content.ranks)
    if by_lane:
        boxes = lane_boxes(trace, ranks, BoxGrid(11, 1, 6) if compact else BoxGrid(13, 1, 8))
    else:
        grid = BoxGrid(11, 1) if compact else BoxGrid()
        boxes = cell_boxes(trace, ranks, GRID if hang is not None else grid)
    if hang is not None and content.memory:
        raise ValueError("a step that does not finish has no memory curve; leave the memory out")
    unit = memory_unit(trace)
    curves = held(trace, ranks, unit) if content.memory else []
    return _Panel(described(trace), trace, hang, within(boxes, window), by_lane, curves, unit)


def _timeline(
    panels: Sequence[_Panel], content: FigureContent, style: FigureStyle, window: Window, colours: Palette
) -> Sheet:
    many, span = len(panels) > 1, window[1] - window[0]
    margins = _margins(panels, style, memory=content.memory)
    natural, least = (
        max(natural_width(panel.boxes, span, panel.box_width(size)) for panel in panels)
        for size in (None, min(label_sizes(style.scale)))
    )
    width, count = layout(natural, _strip_height(panels), margins.both, style, least=least)
    sheet = Sheet(width, style.scale)
    put_title(sheet, style.title if style.title is not None else panels[0].name if not many else "")
    parts = strips(window, count, panels[0].trace.clock)
    per_unit = (width - margins.both) / (parts[0][1] - parts[0][0])
    size = min(fit(panel.boxes, per_unit, label_sizes(style.scale)).size for panel in panels)
    for part in parts:
        scale = Scale(margins.left, 0.0, per_unit, part[0])
        for panel in panels:
            if many:
                heading(sheet, margins.left, panel.name, panel.facts if part is parts[0] else "")
            put = _Strip(sheet, margins, part, scale.moved(sheet.y + _above(many, part is parts[0])))
            put.rows(panel, colours, size)
            if not many and panel.hang is None:
                put.phases(panel)
            put.memory(panel, max(each.peak for each in panels) if many else None)
        sheet.y += 12 if any(panel.hang is not None for panel in panels) else 0
        _axis(sheet, panels, scale, part, window)
    found = [entry for panel in panels for entry in panel.entries(colours)]
    extra = [EXTRA] if not many and panels[0].has_extra else []
    left = margins.left if not margins.cramped else 8.0
    legend(sheet, left, [*found, *extra])
    explained = ["Memory: a line a device, the highest dark, its peak marked."] if many and content.memory else []
    put_about(sheet, [*(panel.trace.about for panel in panels), *explained], left)
    return sheet


@dataclass(frozen=True)
class _Strip:
    """A strip of time on a sheet; each method moves down."""

    sheet: Sheet
    margins: Margins
    time: Window
    scale: Scale

    def rows(self, panel: _Panel, colours: Palette, size: float) -> None:
        """The boxes of a panel, with the names of their rows."""
        boxes = within(panel.boxes, self.time)
        ran = boxes if panel.hang is None else boxes.some(~panel.hang.waiting[boxes.op])
        draw_boxes(self.sheet, ran, colours, self.scale, size)
        if panel.hang is not None:
            put_waiting(self.sheet, boxes, panel.trace, panel.hang, self.scale, (size,))
        row_names(self.sheet, boxes, self.scale, self.margins)
        self.sheet.y = self.scale.top + boxes.height

    def phases(self, panel: _Panel) -> None:
        """Marks around the boxes: phases and extra cells."""
        boxes = within(panel.boxes, self.time)
        phase_brackets(self.sheet, panel.trace, boxes, self.scale, self.time)
        outline_extra(self.sheet, panel.trace, boxes, self.scale)

    def memory(self, panel: _Panel, most: float | None) -> None:
        """The memory of a panel: a strip a device, or with `most` all of them in one strip of that scale."""
        if panel.curves and most is not None:
            memory_lines(self.sheet, panel.curves, self.scale, self.time, panel.unit, most or 1.0)
        elif panel.curves:
            memory_strips(self.sheet, panel.curves, self.scale, self.time, panel.unit, self.margins)


def _axis(sheet: Sheet, panels: Sequence[_Panel], scale: Scale, part: Window, window: Window) -> None:
    """The time axis of a strip; where all panels hang, it ends with the last of them: what waits has no time."""
    ends = [window[1] if panel.hang is None else panel.hang.since(panel.trace) for panel in panels]
    last = min(window[1], max(ends))
    if part[0] < last:
        time_axis(sheet, scale, (part[0], min(part[1], last)), (window[0], last), panels[0].trace.clock.unit)


def _above(many: bool, first: bool) -> float:
    """Points above the rows: for phases, where there is no heading, and from the axis of the strip before."""
    return (0.0 if many else 16.0) + (0.0 if first or many else 5.0)


def _margins(panels: Sequence[_Panel], style: FigureStyle, *, memory: bool) -> Margins:
    """The widest that a panel needs."""
    rows = [panel.boxes.rows for panel in panels]
    last = max((row.rank for each in rows for row in each), default=0)
    return Margins.of(range(last + 1), style, by_lane=any(panel.by_lane for panel in panels), memory=memory)


def _strip_height(panels: Sequence[_Panel]) -> float:
    """Points, roughly."""
    memory = (28.0 * len(panel.curves) if len(panels) == 1 else 32.0 for panel in panels if panel.curves)
    return sum(panel.boxes.height + 24 for panel in panels) + sum(memory) + 18


def cell_sheet(trace: Trace, which: Phase, style: FigureStyle = PLAIN) -> Sheet:
    """The figure of one cell's lanes, before it is written."""
    if style.fold is not None:
        raise ValueError("one cell's lanes are one strip; leave `fold` out")
    colours, boxes = palette(style.palette), cell_panel(trace, which)
    margins = Margins.of(range(1), style, by_lane=True, memory=False)
    left, span = 72.0 if not margins.cramped else 38.0, float(boxes.right.max())
    width, _ = layout(natural_width(boxes, span, 1.6 * NAME_WIDTH), 0.0, left + 12, replace(style, fold=1))
    sheet = Sheet(width, style.scale)
    put_title(sheet, style.title if style.title is not None else PANEL_NAMES[which])
    scale = Scale(left, sheet.y + 4, (sheet.width - left - 12) / span)
    draw_panel(sheet, boxes, colours, scale, margins)
    sheet.y = scale.top + boxes.height
    time_axis(sheet, scale, (0.0, span), (0.0, span), trace.clock.unit)
    legend(sheet, left if not margins.cramped else 8, entries(trace, boxes, colours))
    put_about(sheet, [trace.about], left if not margins.cramped else 8)
    return sheet


def _of_update(traces: Sequence[Trace], content: FigureContent, style: FigureStyle) -> Sheet:
    if len(traces) > 1:
        raise ValueError(f"a weight update has a figure of its own, got {len(traces)} traces; draw one a figure")
    if content.grain is not None or content.memory:
        raise ValueError("a weight update is drawn by its buffers; leave the grain and the memory out")
    return update_sheet(traces[0], content.ranks, content.window, style)
