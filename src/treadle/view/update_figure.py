"""The figure of a weight update: a device's buffers at the left, what fills and reads them over time at the right."""

from __future__ import annotations

import numpy as np

from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.view.box_text import extent, fit
from treadle.view.boxes import ROLES, Boxes, Row, Texts
from treadle.view.figure_parts import time_axis
from treadle.view.frame import checked_ranks, layout, natural_width, put_about, put_title
from treadle.view.palette import ROLE_OF, Look, Palette, Role, palette
from treadle.view.sheet import FAINT, INK, Scale, Sheet, draw_boxes, label_sizes
from treadle.view.style import FigureStyle
from treadle.view.update_rows import BufferRow, buffer_rows, described_update
from treadle.view.window import Window, checked_window, strips, within

TRACK, DEVICE_GAP = 14.0, 9.0
"""Points: the height of a buffer's row, and what lies between two devices."""
_NAMES, _BUFFER, _DIVIDE, _START = 8.0, 64.0, 102.0, 112.0
"""Points from the left: names, the boxes of the buffers, the line that divides them from time, time 0."""
_BUFFER_WIDTH, _RIGHT, _SHORT = 30.0, 14.0, 23.0
_ROLE = np.array([ROLES.index(ROLE_OF[kind]) for kind in OpKind])
_LEGEND = (
    (Role.H2D, "H2D"),
    (Role.SOURCE, "Broadcast (src)"),
    (Role.RELOAD, "Reload weights"),
    (Role.BROADCAST, "Broadcast (dst)"),
)


def update_sheet(trace: Trace, ranks: range | None, window: Window | None, style: FigureStyle) -> Sheet:
    """The figure of an update, before it is written."""
    colours, chosen, time = palette(style.palette), checked_ranks(trace, ranks), checked_window([trace], window)
    rows = list(buffer_rows(trace, chosen))
    boxes = within(update_boxes(trace, rows), time)
    natural = natural_width(boxes, time[1] - time[0], _SHORT)
    width, count = layout(natural, boxes.height + 20, _START + _RIGHT, style)
    sheet = Sheet(width, style.scale)
    put_title(sheet, style.title if style.title is not None else described_update(trace.program))
    parts = strips(time, count, trace.clock)
    per_unit = (width - _START - _RIGHT) / (parts[0][1] - parts[0][0])
    size = fit(boxes, per_unit, label_sizes(style.scale)).size
    top = sheet.y
    _legend(sheet, colours, rows)
    for part in parts:
        scale, shown = Scale(_START, sheet.y, per_unit, part[0]), within(boxes, part)
        _buffers(sheet, shown, rows, colours, scale)
        draw_boxes(sheet, shown, colours, scale, size)
        sheet.y = scale.top + boxes.height
        _dashes(sheet, top + 2, sheet.y)
        time_axis(sheet, scale, part, time, trace.clock.unit)
        sheet.y += 4
        top = sheet.y
    put_about(sheet, [trace.about], _START if sheet.width > 380 else _NAMES)
    return sheet


def update_boxes(trace: Trace, rows: list[BufferRow]) -> Boxes:
    """A box for each op that takes time, in the row of its buffer. It says its source, as colours show the rest."""
    program = trace.program
    taking = [row.ops[trace.end[row.ops] > trace.start[row.ops]] for row in rows]
    op = np.concatenate([np.zeros(0, np.int64), *taking])
    which = np.repeat(np.arange(len(rows)), [len(ops) for ops in taking])
    rank = np.array([row.rank for row in rows])[which]
    device = np.cumsum(np.r_[0, np.diff([row.rank for row in rows]) != 0]) if rows else np.zeros(0)
    tops = np.arange(len(rows)) * TRACK + device * DEVICE_GAP
    source = (program.kind[op] == OpKind.BROADCAST) & (program.layer[op] == rank)
    origin = int(trace.start.min()) if len(trace.start) else 0
    round_ = program.mb[op].astype(str).astype(object)
    number: Texts = program.layer[op].astype(str).astype(object)
    number = np.where(program.kind[op] == OpKind.H2D, "round " + round_, number)
    return Boxes(
        op,
        which,
        (trace.start[op] - origin) / trace.clock.ticks,
        (trace.end[op] - origin) / trace.clock.ticks,
        tops[which],
        tops[which] + TRACK,
        np.where(source, ROLES.index(Role.SOURCE), _ROLE[program.kind[op]]),
        np.zeros(len(op), bool),
        (number,),
        tuple(Row(row.name, row.rank, float(y), float(y) + TRACK) for row, y in zip(rows, tops, strict=True)),
    )


def _legend(sheet: Sheet, colours: Palette, rows: list[BufferRow]) -> None:
    """Explain the boxes of buffers at the left and the boxes over time in two columns; moves down."""
    y = sheet.y + 10
    kinds = [(Role.H2D, "H2D buffer")] if any(not row.is_ipc for row in rows) else []
    for i, (role, name) in enumerate([*kinds, (Role.BROADCAST, "IPC buffer")]):
        sheet.text(_NAMES, y + 18 * i, name)
        _box(sheet, _BUFFER, y + 18 * i, colours[role])
    wide = _BUFFER_WIDTH + 7 + max(extent(name)[0] for _, name in _LEGEND) * 8 + 18
    columns = max(1, min(2, int((sheet.width - _START) / wide)))
    for i, (role, name) in enumerate(_LEGEND):
        x, line = _START + i % columns * wide, y + 18 * (i // columns)
        _box(sheet, x, line, colours[role])
        sheet.text(x + _BUFFER_WIDTH + 7, line, name)
    note, lines = "numbers: the source", -(-len(_LEGEND) // columns)
    x, beside = _START + columns * wide, _START + columns * wide + extent(note)[0] * 7 < sheet.width - 8
    sheet.text(x if beside else _START, y + 18 * (lines - beside), note, size=7, colour=FAINT)
    sheet.y = y + 18 * (lines - beside) + 20


def _box(sheet: Sheet, x: float, y: float, look: Look) -> None:
    sheet.rectangles(np.array([[x, y - TRACK / 2, x + _BUFFER_WIDTH, y + TRACK / 2]]), look)


def _buffers(sheet: Sheet, boxes: Boxes, rows: list[BufferRow], colours: Palette, scale: Scale) -> None:
    """Each buffer as a box with its name, the device's name beside them."""
    spans: dict[int, list[float]] = {}
    for row, place in zip(rows, boxes.rows, strict=True):
        look = colours[Role.BROADCAST if row.is_ipc else Role.H2D]
        middle = scale.top + (place.top + place.bottom) / 2
        _box(sheet, _BUFFER, middle, look)
        name = f"IPC {row.name}" if row.is_ipc else row.name
        sheet.text(_BUFFER + _BUFFER_WIDTH / 2, middle, name, size=6.0, across="center")
        spans.setdefault(row.rank, []).append(middle)
    for rank, middles in spans.items():
        sheet.text(_NAMES, (middles[0] + middles[-1]) / 2, f"Device {rank}", size=8)


def _dashes(sheet: Sheet, top: float, bottom: float) -> None:
    """The line between the buffers and what happens to them."""
    edges = np.arange(top, bottom, 6.0)
    sheet.lines([[(_DIVIDE, float(y)), (_DIVIDE, float(min(y + 3.6, bottom)))] for y in edges], INK, 1.2)
