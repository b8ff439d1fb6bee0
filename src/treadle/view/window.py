"""Parts of the time of a figure: the window that is shown, cut into strips, and the boxes within each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle.ir.trace import Clock, Trace
from treadle.view.boxes import Boxes
from treadle.view.memory_curves import Held

Window = tuple[float, float]
"""From one time to a later one, in units of the clock, counted from the trace's first start."""


def end_of(trace: Trace) -> float:
    """Return the length of the trace in units of its clock; a small number where nothing takes time."""
    return max(trace.makespan / trace.clock.ticks, 1e-9)


def checked_window(traces: Sequence[Trace], window: Window | None) -> Window:
    """The part of the time to show, all of it if None, or a ValueError that says how long it is."""
    end = max(end_of(trace) for trace in traces)
    first, last = window if window is not None else (0.0, end)
    if not 0 <= first < last:
        raise ValueError(f"a window is from a time to a later one, within 0 to {end:g}, got {first:g} to {last:g}")
    if first >= end:
        raise ValueError(f"nothing happens at {first:g} and later; the time ends at {end:g} {traces[0].clock.unit}")
    return first, min(last, end)


def strips(window: Window, count: int, clock: Clock) -> list[Window]:
    """Cut a window into equal parts; where time is in units, between whole ones, so the last may be shorter."""
    first, last = window
    long = (last - first) / count
    if clock.unit == "unit" and long > 1:
        long = math.ceil(long)
    edges = [first + i * long for i in range(count) if first + i * long < last]
    return [(edge, min(edge + long, last)) for edge in edges]


def within(boxes: Boxes, window: Window) -> Boxes:
    """Keep the boxes between two times; those at the edges are cut."""
    first, last = window
    seen = boxes.some((boxes.right > first) & (boxes.left < last))
    return replace(seen, left=np.maximum(seen.left, first), right=np.minimum(seen.right, last))


def held_within(curve: Held, window: Window) -> Held:
    """The part of a memory curve between two times; it begins with what is held by then."""
    first, last = window
    seen = (curve.time > first) & (curve.time < last)
    before = int(np.searchsorted(curve.time, first, side="right")) - 1
    held = float(curve.size[before]) if before >= 0 else 0.0
    size = np.r_[held, curve.size[seen]]
    time = np.r_[first, curve.time[seen]]
    return replace(curve, time=np.r_[time, last], size=np.r_[size, size[-1]])
