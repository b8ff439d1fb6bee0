"""Simulating: the one execution under costs, as a Trace; what a Trace says; what two of them say about each other."""

from __future__ import annotations

from weft.simulate.compare import Comparison, Row, Versus, compare
from weft.simulate.difference import Delta, Difference, Group, Outlier
from weft.simulate.fitting import fit
from weft.simulate.metrics import Cover, Metrics, RankMetrics, measure
from weft.simulate.path import PathSummary, critical_path, summarize_path
from weft.simulate.phases import steady_idle
from weft.simulate.predict import simulate
from weft.simulate.waiting import without_waiting

__all__ = [
    "Comparison",
    "Cover",
    "Delta",
    "Difference",
    "Group",
    "Metrics",
    "Outlier",
    "PathSummary",
    "RankMetrics",
    "Row",
    "Versus",
    "compare",
    "critical_path",
    "fit",
    "measure",
    "simulate",
    "steady_idle",
    "summarize_path",
    "without_waiting",
]
