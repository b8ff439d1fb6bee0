"""Two traces of one program above each other on one time axis: what was predicted, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes, Grid, cell_boxes, lane_boxes
from treadle.view.frame import (
    LEFT,
    LEFT_OF_LANES,
    RIGHT,
    checked_grain,
    checked_ranks,
    described,
    end_of,
    put_about,
    put_title,
)
from treadle.view.palette import palette
from treadle.view.parts import entries, legend, put_block, time_axis
from treadle.view.sheet import Scale, Sheet, checked_path

WIDTH = 1000.0
"""Points across: a page of a screen, where boxes without room for their names say nothing."""


def against_figure(
    traces: Sequence[Trace],
    path: str | Path,
    *,
    titles: Sequence[str],
    ranks: range | None = None,
    window: tuple[float, float] | None = None,
    palette_name: str = "kimi",
    title: str | None = None,
) -> None:
    """Draws traces at their own grain; `window` is the part of the time to show, in units of their clock."""
    target, colours = checked_path(path), palette(palette_name)
    grains = {checked_grain(trace, None) for trace in traces}
    if len(grains) > 1 or len({trace.clock for trace in traces}) > 1:
        raise ValueError("traces above each other need one grain and one unit of time; these differ")
    by_lane = grains == {"lanes"}
    first, last = checked_window(traces, window)
    left = LEFT_OF_LANES if by_lane else LEFT
    sheet = Sheet(WIDTH)
    per_unit = (sheet.width - left - RIGHT) / (last - first)
    put_title(sheet, title if title is not None else described(traces[0]))
    drawn = []
    for trace, name in zip(traces, titles, strict=True):
        chosen = checked_ranks(trace, ranks)
        whole = lane_boxes(trace, chosen, Grid(11, 1, 6)) if by_lane else cell_boxes(trace, chosen)
        boxes = within(whole, first, last)
        scale = Scale(left, 0.0, per_unit, first)
        put_block(sheet, boxes, colours, scale, name=name, facts=_long(trace), by_lane=by_lane)
        drawn.append((trace, boxes))
    time_axis(sheet, Scale(left, 0.0, per_unit, first), last - first, traces[0].clock.unit)
    found = dict.fromkeys(entry for trace, boxes in drawn for entry in entries(trace, boxes, colours))
    legend(sheet, left, found)
    put_about(sheet, " ".join(dict.fromkeys(trace.about for trace in traces if trace.about)), left)
    sheet.save(target)


def checked_window(traces: Sequence[Trace], window: tuple[float, float] | None) -> tuple[float, float]:
    """The part of the time to show, all of it if None, or a ValueError that says how long it is."""
    end = max(end_of(trace) for trace in traces)
    first, last = window if window is not None else (0.0, end)
    if not 0 <= first < last:
        raise ValueError(f"a window is from a time to a later one, within 0 to {end:g}, got {first:g} to {last:g}")
    if first >= end:
        raise ValueError(f"nothing happens at {first:g} and later; the traces end at {end:g} {traces[0].clock.unit}")
    return first, min(last, end)


def within(boxes: Boxes, first: float, last: float) -> Boxes:
    """Keep the boxes between two times; those at the edges are cut."""
    seen = (boxes.right > first) & (boxes.left < last)
    columns = {n: getattr(boxes, n)[seen] for n in ("op", "row", "top", "bottom", "role", "later")}
    return replace(
        boxes,
        **columns,
        left=np.maximum(boxes.left[seen], first),
        right=np.minimum(boxes.right[seen], last),
        says=tuple(text[seen] for text in boxes.says),
    )


def _long(trace: Trace) -> str:
    end, unit = end_of(trace), trace.clock.unit
    return f"{end / 1000:,.1f} ms" if unit == "us" else f"{end:g} {'units' if unit == 'unit' else unit}"
