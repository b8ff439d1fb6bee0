"""The bubble of a schedule in closed form: what its slowest rank idles in a step besides its own work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class ChunkTimes(NamedTuple):
    """Seconds of one chunk and one micro-batch: forward, input half and weight half of the backward."""

    f: float
    i: float
    w: float

    @property
    def whole(self) -> float:
        """Forward and backward."""
        return self.f + self.i + self.w


def _fill(pp: int, one: ChunkTimes) -> float:
    return (pp - 1) * one.whole


BUBBLES: Mapping[str, Callable[[int, ChunkTimes], float]] = {
    "gpipe": _fill,
    "1f1b": _fill,
    "interleaved": _fill,
    "interleaved-overlap": _fill,
    "zb-h1": lambda pp, one: (pp - 1) * (one.f + one.i - one.w),
    "zb-v": lambda pp, one: (pp - 1) * one.f,
    "v-half": lambda pp, one: (3 * pp - 4) * one.f,
    "v-min": lambda pp, one: (4 * pp - 5) * one.f,
    "dualpipe": lambda pp, one: (pp / 2 - 1) * (one.f + 2 * one.i - one.w),
    "dualpipev": lambda pp, one: (pp - 1) * (one.f + 2 * one.i - one.w),
}
"""What each schedule's `Family.bubble` says, in times of one chunk; others are taken to fill and drain as 1F1B."""


def bubble_seconds(schedule: str, pp: int, one: ChunkTimes) -> float:
    """Return the seconds that a rank idles in a step, if stages are alike and micro-batches are enough.

    Example:
        >>> bubble_seconds("zb-h1", 4, ChunkTimes(1.0, 1.0, 1.0))
        3.0

    """
    return max(0.0, BUBBLES.get(schedule, _fill)(pp, one)) if pp > 1 else 0.0
