"""The frame of all figures: checks of arguments, width, title and small print."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes
from treadle.view.labels import SIDE, extent, room
from treadle.view.sheet import FAINT, Sheet
from treadle.view.update import described_update

Grain: TypeAlias = Literal["cells", "lanes"]

NARROW, WIDE = 500.0, 3600.0
"""Points: two columns of a paper, and the widest that is still one picture, to be zoomed into."""

NAME_WIDTH = 14.0
"""Points of a short box of a lane: room for most names, as a figure with room for all is too wide to look at."""

MOST_RANKS = 256

LEFT, LEFT_OF_LANES, RIGHT = 54.0, 112.0, 34.0
"""Margins: names of devices, of lanes too, and the values of peaks."""

_SMALL = 6.5


def checked_grain(trace: Trace, grain: str | None) -> Grain:
    """The grain to draw at, the trace's own if None, or a ValueError that says how to come by it."""
    by_layer = trace.program.layout.by_layer
    if grain not in (None, "cells", "lanes"):
        raise ValueError(f"a figure's grain is cells or lanes, got {grain!r}")
    if grain == "lanes" and not by_layer:
        raise ValueError("this trace is at the grain of cells and has no lanes to draw; lower it with --layers N")
    if grain == "cells" and by_layer:
        raise ValueError("this trace is at the grain of layers; leave --layers out to draw its cells")
    return "lanes" if by_layer else "cells"


def checked_ranks(trace: Trace, ranks: range | None) -> range:
    """The ranks to draw, or a ValueError that says which there are."""
    count = trace.program.num_ranks
    if not len(trace.start):
        raise ValueError("the trace has no ops to draw")
    ranks = ranks if ranks is not None else range(count)
    if len(ranks) > MOST_RANKS:
        raise ValueError(f"a figure shows up to {MOST_RANKS} ranks, got {len(ranks)}; choose some, or one pipeline")
    if not ranks or ranks.step < 1 or ranks[0] < 0 or ranks[-1] >= count:
        raise ValueError(f"ranks go from 0 to {count - 1}, got {ranks.start} to {ranks.stop - 1}")
    return ranks


def end_of(trace: Trace) -> float:
    """Return the length of the trace in units of its clock; a small number where nothing takes time."""
    return max(trace.makespan / trace.clock.ticks, 1e-9)


def width_for(boxes: Boxes, end: float, box: float) -> float:
    """Points across, so that a usual short box is `box` wide."""
    short = float(np.quantile(boxes.right - boxes.left, 0.25)) if len(boxes) else end
    return float(np.clip(box * end / short, NARROW, WIDE))


def number_width(boxes: Boxes) -> float:
    """Points that a box needs to say its number."""
    longest = max((str(text) for text in boxes.says[0]), key=len, default="0")
    return max(11.5, room(longest) * _SMALL + 2 * SIDE)


def described(trace: Trace) -> str:
    """Describe a trace, as a default title."""
    layout = trace.program.layout
    if layout.is_update:
        return described_update(trace.program)
    chunks = f", {layout.placement.vpp} chunks each" if layout.placement.vpp > 1 else ""
    total = layout.num_mb * layout.placement.num_pipes
    return f"{_counted(layout.num_ranks, 'device')}{chunks}, {_counted(total, 'micro-batch')}"


def _counted(count: int, name: str) -> str:
    plural = name + ("es" if name.endswith("ch") else "s")
    return f"{count} {name if count == 1 else plural}"


def put_title(sheet: Sheet, title: str) -> None:
    """Write the title at the top; moves down."""
    sheet.text(8, 12, title, size=9.5, bold=True)
    sheet.y = 24


def put_about(sheet: Sheet, about: str, left: float) -> None:
    """Write the trace's `about` in small print, wrapped to the sheet; moves down."""
    line = ""
    for word in [*about.split(), ""]:
        longer = f"{line} {word}".strip()
        if word and extent(longer)[0] * _SMALL <= sheet.width - left - 10:
            line = longer
            continue
        if line:
            sheet.text(left, sheet.y + 6, line, size=_SMALL, colour=FAINT)
            sheet.y += 9
        line = word
    sheet.y += 6
