"""The frame of all figures: checks of arguments, margins, width and strips, title and small print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from treadle.ir.trace import Trace
from treadle.view.box_text import SIDE, extent, room, wrapped
from treadle.view.boxes import Boxes
from treadle.view.sheet import FAINT, Sheet
from treadle.view.style import FigureStyle

Grain: TypeAlias = Literal["cells", "lanes"]

NARROW, USUAL, WIDE = 500.0, 720.0, 1440.0
"""Points: no figure is narrower unless asked to be; where folding begins; the widest that is not folded."""

NAME_WIDTH = 14.0
"""Points of a short box of a lane: room for most names, as a figure with room for all is too wide to look at."""

MOST_RANKS = 256

_SHORT_NAMES = {"Computation": "Comp", "Communication": "Comm", "Offload": "Copy", "Host": "Host"}
_CRAMPED = 380.0
"""Points; a narrower sheet has short names at its left."""
_SMALL = 6.5
_PEAKS, _RIGHT = 34.0, 12.0
_LEAST_ROOM = 60.0


def checked_grain(trace: Trace, grain: str | None) -> Grain:
    """The grain to draw at, the trace's own if None, or a ValueError that says how to come by it."""
    by_layer = trace.program.layout.by_layer
    if grain not in (None, "cells", "lanes"):
        raise ValueError(f"a figure's grain is cells or lanes, got {grain!r}")
    if grain == "lanes" and not by_layer:
        raise ValueError("this trace is at the grain of cells and has no lanes to draw; lower it with `layers=N`")
    if grain == "cells" and by_layer:
        raise ValueError("this trace is at the grain of layers; leave `layers` out to draw its cells")
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


@dataclass(frozen=True)
class Margins:
    """Points left and right of the time, and how rows are named in them."""

    left: float
    right: float
    cramped: bool
    by_lane: bool

    @classmethod
    def of(cls, ranks: range, style: FigureStyle, *, by_lane: bool, memory: bool) -> Margins:
        """As wide as the names of these ranks, and the values of peaks."""
        cramped = style.layout_width is not None and style.layout_width < _CRAMPED
        right = _PEAKS if memory else _RIGHT
        device = extent(_device(ranks[-1], cramped))[0] * 8
        if cramped:
            device = max(device, extent("memory" if memory else "Device")[0] * _SMALL)
        lane = max(extent(_lane(name, cramped))[0] for name in _SHORT_NAMES) * _SMALL + 8 if by_lane else 0.0
        return cls(5 + device + lane + 5, right, cramped, by_lane)

    @property
    def both(self) -> float:
        """Points beside the time."""
        return self.left + self.right

    def device(self, rank: int) -> str:
        """The name of a rank."""
        return _device(rank, self.cramped)

    def lane(self, name: str) -> str:
        """The name of a row of lanes."""
        return _lane(name, self.cramped)


def _device(rank: int, cramped: bool) -> str:
    return str(rank) if cramped else f"Device {rank}"


def _lane(name: str, cramped: bool) -> str:
    return _SHORT_NAMES.get(name, name) if cramped else name


def natural_width(boxes: Boxes, span: float, box: float) -> float:
    """Points across, so that a usual short box is `box` wide."""
    short = float(np.quantile(boxes.right - boxes.left, 0.25)) if len(boxes) else span
    return box * span / short


def layout(
    natural: float, strip: float, beside: float, style: FigureStyle, *, least: float | None = None
) -> tuple[float, int]:
    """Return the width of the sheet and the number of strips of time, which are `strip` points high.

    In a given width it is one strip if `least` points, for the smallest letters, have room in it. Else it is as many
    as `natural` points, for usual letters, need, as long as the figure stays one that can be looked at: where not,
    labels are left out.
    """
    given, fold = style.layout_width, style.fold
    if given is None:
        count = fold if fold is not None else _strips(natural, strip, USUAL, beside, style.tallest)
        widest = 2.5 * WIDE if fold is not None else WIDE
        return float(np.clip(natural / count + beside, NARROW, widest)), count
    if given - beside < _LEAST_ROOM:
        least = (beside + _LEAST_ROOM) * style.scale / 72
        raise ValueError(
            f"names and time need {least:.1f} inches at this size of letters, got {given * style.scale / 72:.2f}; "
            "a wider figure, or a smaller font size"
        )
    if fold is not None:
        return given, fold
    single = least is not None and least <= given - beside
    return given, 1 if single else _strips(natural, strip, given, beside, style.tallest)


def _strips(natural: float, strip: float, width: float, beside: float, tallest: float) -> int:
    count = max(1, math.ceil(natural / (width - beside) - 1e-6))
    return count if count * strip <= tallest * width else 1


def number_width(boxes: Boxes, size: float = _SMALL) -> float:
    """Return the points that a box needs to say its number in letters of a size."""
    longest = max((str(text) for text in boxes.says[0]), key=len, default="0")
    return room(longest) * size + 2 * SIDE


def put_title(sheet: Sheet, title: str) -> None:
    """Write the title at the top, wrapped to the sheet, if there is one; moves down."""
    sheet.y = 4
    for line in wrapped(title, (sheet.width - 16) / 9.5, "bold"):
        sheet.text(8, sheet.y + 8, line, size=9.5, bold=True)
        sheet.y += 13
    sheet.y += 5 if title else 0


def put_about(sheet: Sheet, abouts: Sequence[str], left: float) -> None:
    """Write where the times come from in small print, each once, wrapped to the sheet; moves down."""
    width = (sheet.width - left - 10) / _SMALL
    for line in (line for about in dict.fromkeys(abouts) for line in wrapped(about, width)):
        sheet.text(left, sheet.y + 6, line, size=_SMALL, colour=FAINT)
        sheet.y += 9
    sheet.y += 6
