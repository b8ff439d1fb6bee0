"""Simulating: the one execution under costs, as a Trace; what a Trace says; what two of them say about each other."""

from __future__ import annotations

from treadle.simulator.compare import Comparison, ComparisonRow, Versus, compare
from treadle.simulator.difference import Delta, Difference, OpGroup, Outlier
from treadle.simulator.fitting import fit
from treadle.simulator.metrics import Cover, Metrics, RankMetrics, measure
from treadle.simulator.path import PathSummary, critical_path, summarize_path
from treadle.simulator.predict import Durations, simulate
from treadle.simulator.slowness import Stragglers
from treadle.simulator.steady_phase import steady_idle
from treadle.simulator.waiting import without_waiting

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
