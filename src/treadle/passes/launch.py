"""The order in which each rank launches its communication, over all its communicators.

Two ranks that launch two collectives of different groups in opposite orders can deadlock, whatever the streams. In the
order in which ops start in one execution that cannot happen: it is one order over the whole program, and each rank's is
its part of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.execute import execute, leaders
from treadle.ir.ops import COMMUNICATION
from treadle.ir.program import NEVER, Longs, Program

_FINE = 4096  # makes room for a tick that every op takes, so that no op starts with one that needs it


def order_launches(program: Program, dur: Longs) -> Program:
    """Numbers each rank's communication by when it starts under these durations."""
    fine = max(1, min(_FINE, int(2.0**62 / max(1.0, dur.sum(dtype=np.float64)))))  # times stay within 64 bits
    start = execute(program, dur * fine + 1).start
    lane = program.lane_of
    ops = np.flatnonzero(np.isin(program.lane_kind, COMMUNICATION)[lane])
    rank = program.lane_rank[lane[ops]]
    order = ops[np.lexsort((leaders(program)[ops], start[ops], rank))]
    count = np.bincount(rank, minlength=program.num_ranks)
    launch = np.full(program.num_ops, NEVER, np.int32)
    launch[order] = np.arange(len(ops)) - np.repeat(np.cumsum(count) - count, count)
    return replace(program, launch=launch)
