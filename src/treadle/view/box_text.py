"""Text in boxes, as glyph outlines: one collection for each distinct text, placed by offsets.

A text object for each box lays its text out again and takes seven times as long; and outlines have a size that is known
before anything is drawn, so whether a text fits is decided on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath, text_to_path

from treadle.ir.program import Bools
from treadle.view.boxes import Boxes, Floats, Texts

FONT = "DejaVu Sans"
"""matplotlib brings it along, so figures are the same on every machine."""

SIDE, ABOVE = 1.4, 1.0
"""Points left free between a text and the edges of its box."""

_BEARINGS = 0.12
"""What a font's table leaves free beside a text of size 1, left and right together."""

_WIDEST = str.maketrans("012356789", "444444444")

SIZES = (8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0)


@cache
def outline(text: str, weight: str = "normal") -> Path:
    """A text of size 1, centred across, its capitals centred down."""
    path, digit = _at_origin(text, weight), _at_origin("0", weight)
    left, right = path.vertices[:, 0].min(), path.vertices[:, 0].max()
    return Path(path.vertices - np.array([(left + right) / 2, digit.vertices[:, 1].max() / 2]), path.codes)


@cache
def _at_origin(text: str, weight: str) -> TextPath:
    return TextPath((0, 0), text, size=1, prop=_font(weight))


@cache
def _font(weight: str) -> FontProperties:
    return FontProperties(family=FONT, weight=weight, size=1)


@cache
def extent(text: str, weight: str = "normal") -> tuple[float, float]:
    """Width and height of a text of size 1, from the font's own table: 50 times faster than from outlines."""
    width, height, _ = text_to_path.get_text_width_height_descent(text, _font(weight), ismath=False)
    return max(float(width) - _BEARINGS, 0.0), float(height)


def wrapped(text: str, width: float, weight: str = "normal") -> list[str]:
    """Break a text into lines of at most this width at size 1; a longer word has a line of its own."""
    lines, now, used = list[str](), list[str](), 0.0
    space = extent("n n")[0] - extent("nn")[0]
    for word in text.split():
        wide = extent(word, weight)[0] + _BEARINGS
        if now and used + space + wide > width:
            lines.append(" ".join(now))
            now, used = [], 0.0
        used += wide + (space if now else 0.0)
        now.append(word)
    return [*lines, " ".join(now)] if now else lines


def room(text: str) -> float:
    """The width that a text of size 1 needs: that of the widest number of as many digits, so that all or none fit."""
    return max(extent(text)[0], extent(text.translate(_WIDEST))[0])


@dataclass(frozen=True, eq=False)
class Labels:
    """Return the text of each box at one size; an empty string where nothing fits."""

    text: Texts
    size: float


def fit(boxes: Boxes, points_per_unit: float, sizes: Sequence[float] = SIZES) -> Labels:
    """The largest of the sizes at which nearly all boxes can say something; those that cannot stay empty."""
    best = Labels(np.full(len(boxes), "", object), sizes[-1])
    most = -1.0
    for size in sizes:
        text = _fitting(boxes, points_per_unit, size)
        share = float((text != "").mean()) if len(text) else 1.0
        if share > most + 0.04:  # smaller text has to let a good part more boxes speak
            best, most = Labels(text, size), share
    return best


def _fitting(boxes: Boxes, points_per_unit: float, size: float) -> Texts:
    width = (boxes.right - boxes.left) * points_per_unit
    height = boxes.bottom - boxes.top
    chosen = np.full(len(boxes), "", object)
    for says in reversed(boxes.says):
        chosen = np.where(_fits(says, width, height, size), says, chosen)
    return chosen


def _fits(says: Texts, width: Floats, height: Floats, size: float) -> Bools:
    names, which = np.unique(says.astype(str), return_inverse=True)
    extents = np.array([(room(str(name)), extent(str(name))[1]) for name in names]).reshape(-1, 2) * size
    fits: Bools = (extents[which, 0] + 2 * SIDE <= width) & (extents[which, 1] + 2 * ABOVE <= height)
    return fits
