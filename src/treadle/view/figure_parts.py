"""The parts of a figure besides its boxes: row names, time axis, phases, legend, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from treadle.ir.trace import Trace
from treadle.view.box_text import extent
from treadle.view.boxes import ROLES, Boxes, Floats
from treadle.view.frame import Margins
from treadle.view.memory_curves import Held, MemoryUnit
from treadle.view.palette import Look, Palette, Role
from treadle.view.pipeline_phases import extra_cells, phases
from treadle.view.sheet import FAINT, INK, LINE, Scale, Sheet
from treadle.view.window import Window, held_within

OUTLINE = "#1e8a3c"
_PEAK = "#c0392b"
NONE = -2
"""No cell's number; -1 is that of ops outside cells."""
_PHASE_NAMES = ("warm-up", "steady", "cool-down")
_CURVES = ("#1a1a1a", "#6a6a6a", "#9a9a9a", "#c0c0c0")


def row_names(sheet: Sheet, boxes: Boxes, scale: Scale, margins: Margins) -> None:
    """The devices, and where a device has several rows, the rows too."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row in boxes.rows:
        first.setdefault(row.rank, row.top)
        last[row.rank] = row.bottom
        if margins.by_lane:
            middle = scale.top + (row.top + row.bottom) / 2
            sheet.text(scale.left - 5, middle, margins.lane(row.name), size=6.5, across="right", colour=FAINT)
    x, across = (5.0, "left") if margins.by_lane else (scale.left - 5, "right")
    for rank, top in first.items():
        sheet.text(x, scale.top + (top + last[rank]) / 2, margins.device(rank), across=across)
    if margins.cramped:
        sheet.text(x, scale.top - 6, "Device", size=6.5, across=across, colour=FAINT)


def heading(sheet: Sheet, left: float, name: str, facts: str) -> None:
    """The name of a block of boxes, and what is to be said of it, below it where the line is full; moves down."""
    sheet.y += 14
    sheet.text(left, sheet.y, name, bold=True)
    x, room = left + extent(name, "bold")[0] * 8 + 8, sheet.width - 8
    if facts and x + extent(facts)[0] * 7 > room:
        sheet.y += 10
        x = left
    sheet.text(x, sheet.y, facts, size=7, colour=FAINT)
    sheet.y += 8


def time_axis(sheet: Sheet, scale: Scale, window: Window, whole: Window, unit: str) -> None:
    """Ticks at round times, and below the last strip of `whole` what they count; moves down."""
    first, last = window
    per, name = (1000, "ms") if unit == "us" and whole[1] >= 10_000 else (1, "units" if unit == "unit" else unit)
    y, right = sheet.y + 3, scale.at(last)
    most = max(2, min(10, int((right - scale.left) / 45)))
    values = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(first / per, last / per)
    ticks = [(float(t), scale.at(float(t) * per)) for t in values if first <= t * per * (1 + 1e-12) and t * per <= last]
    sheet.lines([[(scale.left, y), (right, y)], *([(x, y), (x, y + 3)] for _, x in ticks)])
    for tick, x in ticks:
        sheet.text(x, y + 9, f"{tick:g}", size=7, across="center")
    if last < whole[1]:
        sheet.y = y + 16
        return
    sheet.text((scale.left + right) / 2, y + 19, f"time ({name})", size=7.5, across="center")
    sheet.y = y + 26


def phase_brackets(sheet: Sheet, trace: Trace, boxes: Boxes, scale: Scale, window: Window) -> None:
    """Brackets over the first device's phases, and a mark on each other row where they meet."""
    origin, ticks = int(trace.start.min()), trace.clock.ticks
    seen: set[int] = set()
    for row in boxes.rows:
        if row.rank in seen:  # of a device's rows the first, computation
            continue
        found = phases(trace, row.rank)
        times = [(t - origin) / ticks for t in (found.start, found.warm, found.cool, found.end)]
        if not seen:
            _brackets(sheet, [scale.at(min(max(t, window[0]), window[1])) for t in times], scale.top + row.top - 4)
        marks = [scale.at(t) for t in dict.fromkeys(times[1:3]) if window[0] < t < window[1]]
        top, bottom = scale.top + row.top - 0.75, scale.top + row.bottom + 0.75
        sheet.lines([[(x, top), (x, bottom)] for x in marks], INK, 1.5, zorder=3.5)
        seen.add(row.rank)


def _brackets(sheet: Sheet, edges: Sequence[float], y: float) -> None:
    for name, left, right in zip(_PHASE_NAMES, edges[:-1], edges[1:], strict=True):
        if extent(name)[0] * 7 >= right - left:  # a bracket without its name says nothing
            continue
        sheet.lines([[(left + 1, y), (left + 1, y - 3), (right - 1, y - 3), (right - 1, y)]], INK, 0.7)
        sheet.text((left + right) / 2, y - 9.5, name, size=7, across="center", over_lines=True)


def outline_extra(sheet: Sheet, trace: Trace, boxes: Boxes, scale: Scale) -> None:
    """Outline the extra warm-up cell of each rank, where the schedule has them."""
    cells = extra_cells(trace)
    rows = [i for i, row in enumerate(boxes.rows) if row.name not in ("Communication", "Offload", "Host")]
    for i in rows:
        cell = cells.get(boxes.rows[i].rank, NONE)
        mine = scale.corners(boxes)[(boxes.row == i) & (trace.program.cell[boxes.op] == cell)]
        if len(mine):
            sheet.outlines(np.r_[mine[:, :2].min(0), mine[:, 2:].max(0)][None], OUTLINE, 2.0)


@dataclass(frozen=True)
class Entry:
    """A line of the legend: one look, two for a split box, or an outline for none."""

    name: str
    looks: tuple[Look, ...]


def entries(trace: Trace, boxes: Boxes, palette: Palette) -> list[Entry]:
    """List the legend's entries for the boxes that are drawn."""
    found = [Entry(ROLES[i].value.capitalize(), (palette[ROLES[i]],)) for i in np.unique(boxes.role)]
    if trace.program.joined[boxes.op].any():
        found.append(Entry("Overlapped forward and backward", (palette[Role.FORWARD], palette[Role.BACKWARD])))
    later = [palette[ROLES[i]] for i in np.unique(boxes.role[boxes.later])]
    dark = [look.of_later_chunk() for look in later if look.later]
    if dark:
        two_ways = trace.program.layout.placement.num_pipes > 1
        found.append(Entry("Dark: the other direction" if two_ways else "Dark: later chunks", tuple(dark[:2])))
    return found


EXTRA = Entry("Extra warm-up forward", ())


def legend(sheet: Sheet, left: float, found: Iterable[Entry]) -> None:
    """Entries side by side, each name once, on as many lines as they need; moves down."""
    x, y = left, sheet.y + 10
    for entry in {entry.name: entry for entry in found}.values():
        boxes = max(1, len(entry.looks))
        width = 11.0 * boxes + 4 + extent(entry.name)[0] * 7.5
        if x > left and x + width > sheet.width - 8:
            x, y = left, y + 13
        for i, look in enumerate(entry.looks):
            sheet.rectangles(np.array([[x + 11.0 * i, y - 4.5, x + 11.0 * (i + 1), y + 4.5]]), look)
        if not entry.looks:
            sheet.outlines(np.array([[x + 1, y - 4, x + 10, y + 4]]), OUTLINE, 2.0)
        sheet.text(x + 11.0 * boxes + 4, y, entry.name, size=7.5)
        x += width + 14
    sheet.y = y + 9


def memory_strips(
    sheet: Sheet, curves: Sequence[Held], scale: Scale, window: Window, unit: MemoryUnit, margins: Margins
) -> None:
    """A strip for each device, all on one scale, with its peak marked; moves down."""
    most = max((curve.peak for curve in curves), default=0.0) or 1.0
    high = 24.0
    sheet.y += 18
    sheet.text(scale.left, sheet.y - 4, f"Activations held ({unit.name})", size=7.5)
    sheet.y += 4
    for curve in curves:
        base = sheet.y + high
        _area(sheet, held_within(curve, window), scale, base, (high - 4) / most)
        sheet.lines([[(scale.left, base), (scale.at(window[1]), base)]], FAINT, 0.4)
        sheet.text(scale.left - 5, base - high / 2 + 2, margins.device(curve.rank), across="right")
        _peak(sheet, curve, scale, window, base - curve.peak * (high - 4) / most, unit)
        sheet.y = base + 4
    sheet.y += 2


def memory_lines(
    sheet: Sheet, curves: Sequence[Held], scale: Scale, window: Window, unit: MemoryUnit, most: float
) -> None:
    """All devices of a trace in one strip, darker where more is held at most; the highest peak marked; moves down."""
    high = 30.0
    base = sheet.y + high + 3
    order = sorted(curves, key=lambda curve: curve.peak)
    for shade, curve in zip(reversed(_shades(len(order))), order, strict=True):
        sheet.lines([_steps(held_within(curve, window), scale, base, (high - 4) / most)], shade, 0.9)
    sheet.lines([[(scale.left, base), (scale.at(window[1]), base)]], FAINT, 0.4)
    sheet.text(scale.left - 5, base - high / 2 + 2, "memory", size=6.5, across="right", colour=FAINT)
    if order:
        _peak(sheet, order[-1], scale, window, base - order[-1].peak * (high - 4) / most, unit)
    sheet.y = base + 2


def _shades(count: int) -> list[str]:
    return [_CURVES[i * len(_CURVES) // count] for i in range(count)]


def _steps(curve: Held, scale: Scale, base: float, points_per_size: float) -> Floats:
    """The corners of a curve: at each time from what was held to what is held."""
    x = np.repeat(scale.x(curve.time), 2)
    y = base - np.r_[0.0, np.repeat(curve.size, 2)[:-1]] * points_per_size
    return np.stack([x, y], 1)


def _area(sheet: Sheet, curve: Held, scale: Scale, base: float, points_per_size: float) -> None:
    points = _steps(curve, scale, base, points_per_size)
    sheet.fill(np.r_[points, [(points[-1, 0], base)]], "#dcdcdc")
    sheet.lines([points[1:]], LINE, 0.7)


def _peak(sheet: Sheet, curve: Held, scale: Scale, window: Window, y: float, unit: MemoryUnit) -> None:
    """A dot where the peak is first reached, its value in the margin beside the end of the axis."""
    if not window[0] <= curve.peak_time < window[1]:
        return
    x, edge = scale.at(curve.peak_time), scale.at(window[1])
    sheet.dot(x, y, _PEAK)
    sheet.lines([[(x, y), (edge + 3, y)]], _PEAK, 0.4, zorder=1.5)
    sheet.text(edge + 5, y, unit.show(curve.peak), size=7, colour=_PEAK)
