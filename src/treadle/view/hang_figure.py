"""What a figure shows of a step that hangs: the time, the ops that wait, and arrows around the circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.view.box_text import fit
from treadle.view.boxes import Boxes, BoxGrid, Floats
from treadle.view.figure_parts import Entry
from treadle.view.hang import Hang
from treadle.view.palette import NAMES, Look
from treadle.view.sheet import Scale, Sheet

RED = "#c81e1e"
_CIRCLE, _WAITS = Look("#ffd9d6"), Look("#f6f6f6")
_GREY = "#6e6e6e"
_BOW = 9.0
"""Points that a bow rises over its row."""
GRID = BoxGrid(15, 16)
"""Rows of devices with room for arrows between them."""


def waiting_entries(boxes: Boxes, hang: Hang) -> list[Entry]:
    """The legend's entries of what waits."""
    shown = boxes.op[hang.waiting[boxes.op]]
    circle = hang.in_circle[shown]
    found = [Entry("Never starts", (_WAITS,))] if (~circle).any() else []
    return [*found, *([Entry("Circle: each waits for the next", (_CIRCLE,))] if circle.any() else [])]


def put_waiting(sheet: Sheet, boxes: Boxes, trace: Trace, hang: Hang, scale: Scale, sizes: Sequence[float]) -> None:
    """The boxes of ops that never start, in red where they wait in a circle, with arrows; and the time of the hang."""
    shown = named(boxes.some(hang.waiting[boxes.op]), trace)
    circle = hang.in_circle[shown.op]
    corners = scale.corners(shown)
    labels = fit(shown, scale.points_per_unit, sizes)
    for mine, look, ink in ((~circle, _WAITS, _GREY), (circle, _CIRCLE, RED)):
        if not mine.any():
            continue
        sheet.rectangles(corners[mine], look)
        for i in np.flatnonzero(mine & (labels.text != "")):
            sheet.glyphs(str(labels.text[i]), corners[i, :2][None] / 2 + corners[i, 2:][None] / 2, labels.size, ink)
    if circle.any():
        sheet.outlines(corners[circle], RED, 1.6)
    place = {int(op): corner for op, corner in zip(shown.op, corners, strict=True)}
    for waits, wanted in hang.circle:
        if waits in place and wanted in place:
            _arrow(sheet, place[waits], place[wanted], corners[circle, 1])
    _hang_line(sheet, boxes, scale, hang.since(trace))


def named(boxes: Boxes, trace: Trace) -> Boxes:
    """Boxes that say their kind too: the colour of a waiting one does not."""
    name = np.array([NAMES[kind] for kind in OpKind], object)[trace.program.kind[boxes.op]]
    texts = [name + text for text in boxes.says] if not trace.program.layout.by_layer else list(boxes.says)
    return replace(boxes, says=(*texts, name))


def _arrow(sheet: Sheet, waits: Floats, wanted: Floats, tops: Floats) -> None:
    """From a box to the one it waits for: a bow along its row, away from other rows; straight between rows."""
    start, stop = (waits[0] + waits[2]) / 2, (wanted[0] + wanted[2]) / 2
    if waits[1] == wanted[1]:
        lower, upper = bool((tops > waits[1]).any()), bool((tops < waits[1]).any())
        over = lower if lower != upper else stop > start
        bend = 2 * _BOW / max(abs(stop - start), 1) * (-1 if over == (stop > start) else 1)
        edge = 1 if over else 3
        sheet.arrow((start, waits[edge]), (stop, wanted[edge]), RED, bend=bend)
        return
    down = wanted[1] > waits[1]
    aside = 4.0 if down else -4.0  # two arrows between the same boxes stay apart
    edges = (waits[3], wanted[1]) if down else (waits[1], wanted[3])
    sheet.arrow((start + aside, edges[0]), (stop + aside, edges[1]), RED, bend=0.0)


def _hang_line(sheet: Sheet, boxes: Boxes, scale: Scale, time: float) -> None:
    x = scale.at(time)
    if not boxes.left.min(initial=np.inf) <= time <= boxes.right.max(initial=-np.inf):
        return
    top, bottom = scale.top - 3, scale.top + boxes.height + 2
    dashes = np.arange(top, bottom, 4.0)
    sheet.lines([[(x, float(y)), (x, float(min(y + 2.4, bottom)))] for y in dashes], RED, 1.0, zorder=3.5)
    sheet.text(x, scale.top - 9, "hangs here", size=7, across="center", colour=RED)
