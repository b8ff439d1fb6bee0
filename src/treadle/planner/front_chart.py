"""The simulated jobs of a search as dots over step time and memory, and their Pareto front as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from treadle.estimate.cluster import GIB
from treadle.planner.job_estimate import JobEstimate, describe
from treadle.planner.ranked_search import SearchResult

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 330, 60, 14, 20, 54
_FOOT = _HEIGHT - _BOTTOM
_TICKS = 6
_LINE = 22.0
"""Units from line to line of names, which a phone shows larger."""
_SLOWEST = 3.0
"""Steps of the best: slower jobs are left out of the chart, as they would squeeze the others into a corner."""


def front_chart(found: SearchResult, marked: Mapping[str, JobEstimate]) -> str:
    """Return the SVG; `marked` jobs are ringed and named, the first of two that are the same."""
    timed = [each for each in found.fitting if each.ticks is not None]
    slowest = min(max(each.step_s for each in timed), _SLOWEST * found.best.step_s)
    across = _Axis(min(each.step_s for each in timed), slowest, _LEFT, _WIDTH - _RIGHT)
    least = min(each.memory_bytes for each in timed) / GIB
    up = _Axis(least, found.memory_limit / GIB, _FOOT, _TOP)

    def place(each: JobEstimate) -> tuple[float, float]:
        return across.at(each.step_s), up.at(each.memory_bytes / GIB)

    dots = {place(each) for each in timed if each.step_s <= slowest}
    front = [each for each in found.front if each.step_s <= slowest]
    places = [place(each) for each in front]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _staircase(places))
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{_hover(each)}</title></circle>'
        for each, (x, y) in zip(front, places, strict=True)
    )
    shown = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in sorted(dots))
    rings = {place(each): name for name, each in reversed([*marked.items()])}
    limit = up.at(found.memory_limit / GIB)
    return (
        f'<svg class="scatter" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Step time and memory of {len(timed):,} simulated jobs; the table below has the Pareto front">'
        f'{_axes(across, up)}<g class="limit"><line x1="{_LEFT}" y1="{limit:.1f}" x2="{_WIDTH - _RIGHT}" '
        f'y2="{limit:.1f}"/><text x="{_WIDTH - _RIGHT}" y="{limit - 6:.1f}" text-anchor="end">limit '
        f"{found.memory_limit / GIB:.1f} GiB</text></g>"
        f'<g class="dots">{shown}</g><polyline points="{line}"/><g class="front">{marks}</g>'
        f'<g class="marked">{_rings(rings)}</g></svg>'
    )


def _rings(rings: Mapping[tuple[float, float], str]) -> str:
    """Return rings with their names beside them, each name a line below the one above it where they would meet."""
    made, free = [], -_LINE
    for (x, y), name in sorted(rings.items(), key=lambda ring: (ring[0][1], ring[0][0])):
        row = max(y, free)
        free = row + _LINE
        away, anchor = (1, "start") if x < _WIDTH / 2 else (-1, "end")
        made.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
            f'<path d="M{x + 8 * away:.1f} {y:.1f}L{x + 20 * away:.1f} {row:.1f}"/>'
            f'<text x="{x + 24 * away:.1f}" y="{row + 4:.1f}" text-anchor="{anchor}">{escape(name)}</text>'
        )
    return "".join(made)


def _staircase(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners between places from left to right: a job's memory, until a slower one takes less."""
    corners = [(right[0], left[1]) for left, right in pairwise(places)]
    return [*places[:1], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]


class _Axis:
    """A linear axis from `low` at `start` to `high` at `stop`, widened to round numbers."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        span = max(high - low, 0.01 * high, 1e-12)
        raw = span / (_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(raw))
        self.step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
        self.low = math.floor(low / self.step) * self.step
        self.high = max(math.ceil(high / self.step), round(self.low / self.step) + 1) * self.step
        self.start, self.stop = start, stop

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        return [self.low + number * self.step for number in range(round((self.high - self.low) / self.step) + 1)]


def _axes(across: _Axis, up: _Axis) -> str:
    made = [
        f'<text x="{across.at(value):.1f}" y="{_FOOT + 21}" text-anchor="middle">{value:.6g}</text>'
        for value in across.ticks
    ]
    for value in up.ticks:
        y = up.at(value)
        made.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        made.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    middle = (_TOP + _FOOT) / 2
    made.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step, s</text>')
    made.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">memory, GiB</text>'
    )
    return "".join(made)


def _hover(each: JobEstimate) -> str:
    return escape(f"{describe(each.job)}: {each.step_s:.3f} s, {each.memory_bytes / GIB:.1f} GiB")
