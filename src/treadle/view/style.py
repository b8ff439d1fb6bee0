"""The size and the look of a figure: how wide on paper, how large its letters, in how many strips of time.

All figures are laid out in points at letters of 8 pt; a figure of larger letters is the same layout, magnified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTHS = {"column": 3.3, "text": 5.5, "slide": 13.33}
"""Inches: a column of a two-column paper (ICML 3.25, ACM 3.33), the text of NeurIPS and ICLR, a slide."""

SUFFIXES = (".svg", ".png", ".pdf")

BASE_PT = 8.0
"""Letters of the layout."""

_COLUMN_IN, _SLIDE_IN = 3.5, 12.0
"""Inches: up to the first a figure is of a column, from the second on of a slide."""

_COLUMN_PT, _SLIDE_PT = 7.0, 14.0
_LEAST_IN, _MOST_IN = 1.5, 100.0
_LEAST_PT, _MOST_PT = 3.0, 72.0
_MOST_STRIPS = 100


@dataclass(frozen=True)
class FigureStyle:
    """How a figure looks, whatever it shows.

    `width` is inches (6.5, "6.5in") or a name of WIDTHS; None is as wide as the labels need, up to 10 inches. `fold`
    cuts the time into so many strips below each other; None is as many as the labels need. `font_size` is that of
    names, in points; None is 8, 7 up to the width of a column and 14 from that of a slide. `title` None is the
    figure's own, "" is none.
    """

    width: float | str | None = None
    fold: int | None = None
    font_size: float | None = None
    title: str | None = None
    palette: str = "kimi"

    def __post_init__(self) -> None:
        if self.width is not None:
            _inches(self.width)
        if self.fold is not None and not 1 <= self.fold <= _MOST_STRIPS:
            raise ValueError(f"a figure is folded into 1 to {_MOST_STRIPS} strips of time, got {self.fold}")
        if self.font_size is not None and not _LEAST_PT <= self.font_size <= _MOST_PT:
            raise ValueError(f"letters are {_LEAST_PT:g} to {_MOST_PT:g} points high, got {self.font_size:g}")

    @property
    def scale(self) -> float:
        """Points on paper of a point of the layout."""
        if self.font_size is not None:
            return self.font_size / BASE_PT
        if self.width is None or _COLUMN_IN < _inches(self.width) < _SLIDE_IN:
            return 1.0
        return (_COLUMN_PT if _inches(self.width) <= _COLUMN_IN else _SLIDE_PT) / BASE_PT

    @property
    def tallest(self) -> float:
        """Height over width of the tallest figure that is folded by itself."""
        return 0.5 if self.width is not None and _inches(self.width) >= _SLIDE_IN else 1.75

    @property
    def layout_width(self) -> float | None:
        """The width in points of the layout, or None if the figure chooses it."""
        return None if self.width is None else _inches(self.width) * 72 / self.scale


def _inches(width: float | str) -> float:
    """Return the inches of a width: a name, or a number of them."""
    if isinstance(width, str) and width in WIDTHS:
        return WIDTHS[width]
    try:
        inches = float(width.removesuffix("in") if isinstance(width, str) else width)
    except ValueError:
        inches = math.nan
    if not _LEAST_IN <= inches <= _MOST_IN:
        named = ", ".join(f"{name} ({size} in)" for name, size in WIDTHS.items())
        raise ValueError(
            f"a figure's width is {named}, or {_LEAST_IN:g} to {_MOST_IN:g} inches, got {width!r}; write 6.5 or 6.5in"
        )
    return inches


def checked_path(path: str | Path, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """The path of a figure, or a ValueError that says what its name may end in, or which folder is not there."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"a figure's name ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {str(path.parent)!r}; make it first")
    return path
