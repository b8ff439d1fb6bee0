"""Metrics of a folded step: as of the Trace of every GPU, without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treadle.folding.folding import Folded
from treadle.simulator.metrics import Metrics, RankMetrics, measure


def measure_folded(folded: Folded) -> Metrics:
    """Measure a folded step: as `treadle.measure` does the unfolded one, with a row for each GPU.

    Example:
        >>> from treadle.folding.folding import fold
        >>> unit = treadle.load_costs("unit")
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=4), unit)
        >>> metrics = measure_folded(fold(program, unit, ep=1, dp=100))
        >>> len(metrics.ranks), metrics.ranks[0].idle_share
        (200, 0.2)

    """
    pp, num_rows, makespan = folded.pipeline.num_ranks, folded.kinds.num_rows, folded.makespan
    ranks, peaks = (np.empty((pp, num_rows), object) for _ in range(2))
    for kind, first in enumerate(folded.kinds.first.tolist()):
        of_kind = measure(folded.trace(kind))
        rows = slice(first, first + len(folded.kinds.members[kind]))
        ranks[:, rows] = _table([_in_step(rank, makespan) for rank in of_kind.ranks], pp)
        peaks[:, rows] = _table(of_kind.peaks, pp)
    every: list[RankMetrics] = ranks[:, folded.kinds.row].reshape(-1).tolist()
    held = tuple(peaks[:, folded.kinds.row].reshape(-1).tolist())
    unit = folded.pipeline.layout.saved_unit
    return Metrics(makespan, folded.num_ops, folded.clock, tuple(every), held, unit)


def _table(values: Sequence[RankMetrics | float], num_ranks: int) -> npt.NDArray[np.object_]:
    """Return a table with a row for each pipeline rank and a column for each GPU column."""
    flat = np.empty(len(values), object)
    flat[:] = values
    return flat.reshape(num_ranks, -1)


def _in_step(rank: RankMetrics, makespan: int) -> RankMetrics:
    """Count a rank's idle time to the end of the whole step."""
    return replace(rank, idle=makespan - rank.busy)
