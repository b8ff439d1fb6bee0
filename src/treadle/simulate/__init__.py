"""Simulating: the one execution under costs, as a Trace; what a Trace says; what two of them say about each other."""

from __future__ import annotations

from treadle.simulate.compare import Comparison, Row, Versus, compare
from treadle.simulate.difference import Delta, Difference, Group, Outlier
from treadle.simulate.fitting import fit
from treadle.simulate.metrics import Cover, Metrics, RankMetrics, measure
from treadle.simulate.path import PathSummary, critical_path, summarize_path
from treadle.simulate.phases import steady_idle
from treadle.simulate.predict import simulate
from treadle.simulate.waiting import without_waiting

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
