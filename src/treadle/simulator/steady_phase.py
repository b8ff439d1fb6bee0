"""The steady phase of a trace: how much of it compute stands still."""

from __future__ import annotations

import numpy as np

from treadle.ir.ops import BACKWARD, FORWARD, LaneKind, OpKind
from treadle.ir.trace import Trace

_FORWARD, _BACKWARD = (OpKind.F, FORWARD[0]), (OpKind.B, BACKWARD[-1])
"""A forward and a whole backward: of a cell, and of a layer the part that each has."""


def steady_idle(trace: Trace) -> tuple[float, ...]:
    """Return each rank's idle share of compute over its overlapped cells, without the first and the last of them.

    Cells that hold a forward and a whole backward are overlapped; from the second one's first op to the end of the last
    but one. 0 for a rank with fewer than three.
    """
    program = trace.program
    idle = []
    for rank in range(program.num_ranks):
        lane = int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))[0])
        ops = np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1])
        cell, kind = program.cell[ops], program.kind[ops]
        both = np.intersect1d(cell[np.isin(kind, _FORWARD)], cell[np.isin(kind, _BACKWARD)])
        if len(both) < 3:
            idle.append(0.0)
            continue
        inner = ops[(cell >= both[1]) & (cell <= both[-2]) & ~program.joined[ops]]
        window = int(trace.end[inner].max() - trace.start[inner].min())
        busy = int((trace.end[inner] - trace.start[inner]).sum())
        idle.append(1 - busy / window if window else 0.0)
    return tuple(idle)
