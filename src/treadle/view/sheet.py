"""The paper that figures are drawn on: one coordinate system in points, from the top left, whatever is drawn.

A figure's height follows from what was drawn, so nothing is squeezed and nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from treadle.view.box_text import FONT, SIZES, fit, outline
from treadle.view.boxes import ROLES, Boxes, Floats
from treadle.view.palette import Look, Palette

DPI, FINEST_DPI = 200, 400
LEAST_PIXELS, MOST_PIXELS = 1500, 6000
"""Across, where a narrow sheet gets more to the inch; along the longer side, where a large one gets fewer."""
LEAST_PT = 5.0
"""Points on paper of the smallest label that can be read."""
EDGE = 0.6
THIN = 4.0
"""Points; a narrower box has a finer edge, or it would be all edge."""
INK, FAINT, LINE = "#1a1a1a", "#666666", "#333333"

# Without dates and random ids the same trace gives the same bytes, and a figure's change shows in a diff.
_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# What a user's own matplotlibrc could change in the bytes.
_STYLE = {
    "svg.hashsalt": "treadle",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.5,
    "path.simplify": False,
    "path.sketch": None,
    "savefig.bbox": None,
    "savefig.transparent": False,
}


@dataclass(frozen=True)
class FigureSize:
    """The size of a figure that was written."""

    width_in: float
    height_in: float
    pixels: tuple[int, int] | None

    def __str__(self) -> str:
        if self.pixels is not None:
            return f"{self.pixels[0]}x{self.pixels[1]} pixels"
        return f"{self.width_in:.2f} x {self.height_in:.2f} in"


def label_sizes(scale: float) -> tuple[float, ...]:
    """Return the sizes that labels in boxes may have: on paper none is smaller than can be read."""
    return tuple(size for size in SIZES if size * scale >= LEAST_PT) or SIZES[:1]


class Sheet:
    """A figure in the making; `y` is how far down it is filled, in points of the layout.

    `scale` is how many points on paper a point of the layout is: letters, lines and boxes grow alike.
    """

    def __init__(self, width: float, scale: float = 1.0) -> None:
        self.width, self.y, self.scale = width, 0.0, scale
        self.figure = Figure(figsize=(width * scale / 72, 1), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self._glyphs: dict[tuple[str, float, str], list[Floats]] = {}
        self._points = Affine2D().scale(scale / 72) + self.figure.dpi_scale_trans

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 8.0,
        across: str = "left",
        bold: bool = False,
        colour: str = INK,
        over_lines: bool = False,
    ) -> None:
        """A line of text, centred on y. Dollar signs are dollar signs."""
        weight = "bold" if bold else "normal"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": self.scale} if over_lines else None
        style: dict[str, Any] = {
            "family": FONT,
            "weight": weight,
            "color": colour,
            "bbox": behind,
            "parse_math": False,
            "usetex": False,
        }
        self.axes.text(x, y, text, fontsize=size * self.scale, ha=across, va="center_baseline", **style)

    def lines(
        self,
        segments: Sequence[Sequence[tuple[float, float]] | Floats],
        colour: str = LINE,
        width: float = 0.6,
        zorder: float = 2,
    ) -> None:
        """Polylines."""
        drawn = LineCollection(list(segments), colors=colour, linewidths=width * self.scale, zorder=zorder)
        self.axes.add_collection(drawn, autolim=False)

    def rectangles(self, corners: Floats, look: Look, edge: float = EDGE) -> None:
        """Boxes of one look; `corners` are [left, top, right, bottom]."""
        shapes, thin = _shapes(corners), corners[:, 2] - corners[:, 0] < THIN
        if look.hatch:
            self._hatched(shapes, look)
        for some, width in ((~thin, edge), (thin, edge / 4)):
            if some.any():
                face = "none" if look.hatch else look.fill
                self._polygons(shapes[some], facecolors=face, edgecolors=LINE, linewidths=width * self.scale)

    def _hatched(self, shapes: Floats, look: Look) -> None:
        """All boxes as one path: the renderer paints a hatch anew for each path, half a millisecond a box."""
        closed = np.concatenate([shapes, shapes[:, :1]], 1)
        codes = np.tile(np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], np.uint8), len(shapes))
        path = Path(closed.reshape(-1, 2), codes)
        # A hatch has the colour of the edges, so edges are drawn apart.
        style = {"facecolor": look.fill, "edgecolor": _darker(look), "hatch": look.hatch, "linewidth": 0}
        self.axes.add_artist(PathPatch(path, **style, zorder=1))

    def outlines(self, corners: Floats, colour: str, width: float, *, dashed: bool = False) -> None:
        """Empty boxes."""
        style = {"edgecolors": colour, "linewidths": width * self.scale, "joinstyle": "miter", "zorder": 4}
        self._polygons(_shapes(corners), facecolors="none", linestyles=":" if dashed else "-", **style)

    def fill(self, points: Floats, colour: str) -> None:
        """A filled shape without an edge."""
        self._polygons(points[None], facecolors=colour, linewidths=0)

    def dot(self, x: float, y: float, colour: str) -> None:
        """A dot over lines."""
        self.axes.plot([x], [y], marker="o", markersize=3.2 * self.scale, color=colour, linestyle="none", zorder=5)

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], colour: str, bend: float = 0.2) -> None:
        """A bent arrow over everything."""
        style = {"arrowstyle": "-|>", "mutation_scale": 7 * self.scale, "connectionstyle": f"arc3,rad={bend}"}
        line = {"color": colour, "linewidth": 1.1 * self.scale, "shrinkA": 0, "shrinkB": 0, "zorder": 6}
        self.axes.add_artist(FancyArrowPatch(start, stop, **style, **line))  # type: ignore[arg-type]

    def _polygons(self, shapes: Floats, **style: object) -> None:
        self.axes.add_collection(PolyCollection(shapes, **style), autolim=False)  # type: ignore[arg-type]

    def glyphs(self, text: str, at: Floats, size: float, colour: str) -> None:
        """Write one text at many places, as outlines."""
        self._glyphs.setdefault((text, size, colour), []).append(at)

    def _put_glyphs(self) -> None:
        """One collection for each text, over all strips: a collection costs as much as hundreds of its items."""
        for (text, size, colour), places in self._glyphs.items():
            path, at = outline(text).transformed(Affine2D().scale(size)), np.concatenate(places)
            style: dict[str, Any] = {"facecolors": colour, "linewidths": 0, "zorder": 3}
            marks = PathCollection([path], offsets=at, offset_transform=self.axes.transData, **style)
            marks.set_transform(self._points)
            self.axes.add_collection(marks, autolim=False)
        self._glyphs.clear()

    def save(self, path: FilePath | BinaryIO, form: str | None = None) -> FigureSize:
        """Write the file, in the form of its name's ending. The axes cover the sheet, a point each way."""
        suffix = path.suffix.lower() if isinstance(path, FilePath) else f".{form}"
        self._put_glyphs()
        width, height = self.width * self.scale / 72, self.y * self.scale / 72
        self.figure.set_size_inches(width, height)
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.y, 0)
        dpi = min(max(DPI, min(FINEST_DPI, LEAST_PIXELS / width)), MOST_PIXELS / max(width, height))
        with rc_context(_STYLE):  # type: ignore[arg-type]
            # At level 6, the default, compressing takes half of all the time.
            more: dict[str, Any] = {"pil_kwargs": {"compress_level": 3}} if suffix == ".png" else {}
            self.figure.savefig(path, format=suffix[1:], dpi=dpi, metadata=_METADATA[suffix], **more)
        return FigureSize(width, height, (int(width * dpi), int(height * dpi)) if suffix == ".png" else None)


def draw_boxes(sheet: Sheet, boxes: Boxes, palette: Palette, scale: Scale, size: float | None = None) -> None:
    """Boxes with what they say at this size, or at the one that suits them; a few collections a look."""
    corners = scale.corners(boxes)
    labels = fit(boxes, scale.points_per_unit, label_sizes(sheet.scale) if size is None else (size,))
    centre = np.stack([(corners[:, 0] + corners[:, 2]) / 2, (corners[:, 1] + corners[:, 3]) / 2], 1)
    for index, role in enumerate(ROLES):
        for later in (False, True):
            mine = np.flatnonzero((boxes.role == index) & (boxes.later == later))
            if not len(mine):
                continue
            look = palette[role].of_later_chunk() if later else palette[role]
            sheet.rectangles(corners[mine], look)
            said = labels.text[mine].astype(str)
            for text in np.unique(said[said != ""]):
                sheet.glyphs(str(text), centre[mine[said == text]], labels.size, look.text)


class Scale:
    """The place of a block of boxes on a sheet: left, top, and points per unit of time."""

    def __init__(self, left: float, top: float, points_per_unit: float, origin: float = 0.0) -> None:
        self.left, self.top, self.points_per_unit, self.origin = left, top, points_per_unit, origin

    def moved(self, top: float) -> Scale:
        """The same further down."""
        return Scale(self.left, top, self.points_per_unit, self.origin)

    def x(self, time: Floats) -> Floats:
        """Points from the left."""
        return self.left + (time - self.origin) * self.points_per_unit

    def at(self, time: float) -> float:
        """One of them."""
        return self.left + (time - self.origin) * self.points_per_unit

    def corners(self, boxes: Boxes) -> Floats:
        """[left, top, right, bottom] of each box, in points."""
        return np.stack([self.x(boxes.left), self.top + boxes.top, self.x(boxes.right), self.top + boxes.bottom], 1)


def _shapes(corners: Floats) -> Floats:
    left, top, right, bottom = corners.T
    return np.stack([left, top, right, top, right, bottom, left, bottom], 1).reshape(-1, 4, 2)


def _darker(look: Look) -> str:
    """Return the colour of hatches: dark enough to be seen in grey, too light to hide text."""
    share = 0.86 if look.text == "#000000" else 0.68
    channels = (round(int(look.fill[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)
