"""Simulating: the one execution under costs, as a Trace; what a Trace says; what two of them say about each other."""

from __future__ import annotations

from treadle.simulate.compare import Comparison, ComparisonRow, Versus, compare
from treadle.simulate.difference import Delta, Difference, OpGroup, Outlier
from treadle.simulate.fitting import fit
from treadle.simulate.metrics import Cover, Metrics, RankMetrics, measure
from treadle.simulate.path import PathSummary, critical_path, summarize_path
from treadle.simulate.phases import steady_idle
from treadle.simulate.predict import Durations, simulate
from treadle.simulate.slowness import Stragglers
from treadle.simulate.waiting import without_waiting

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Cover",
    "Delta",
    "Difference",
    "Durations",
    "Metrics",
    "OpGroup",
    "Outlier",
    "PathSummary",
    "RankMetrics",
    "Stragglers",
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
