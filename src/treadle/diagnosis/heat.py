"""Colours of a heatmap: from pale, for a worker that slows nothing down, to dark red for the slowest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = ("#fff5eb", "#fee6ce", "#fdd0a2", "#fdae6b", "#f16913", "#d94801", "#a63603", "#7f2704")
_DARK = 4
"""From this step on text is white."""

_LEAST_SPAN = 0.05
"""Scores that differ by less than this do not use all colours: noise must not look like a cause."""


@dataclass(frozen=True)
class Heat:
    """A scale of scores, from `low` (pale) to `high` (dark)."""

    low: float
    high: float

    @classmethod
    def of(cls, scores: Sequence[Sequence[float]]) -> Heat:
        """Make the scale of all scores; it begins at 1, the score of a worker that slows nothing down."""
        highest = max((score for row in scores for score in row), default=1.0)
        return cls(1.0, max(highest, 1.0 + _LEAST_SPAN))

    def colours(self, score: float) -> tuple[str, str]:
        """The fill of a score, and the colour of text on it."""
        share = min(1.0, max(0.0, (score - self.low) / (self.high - self.low)))
        step = min(len(_STEPS) - 1, int(share * len(_STEPS)))
        return _STEPS[step], "#ffffff" if step >= _DARK else "#1d1f23"
