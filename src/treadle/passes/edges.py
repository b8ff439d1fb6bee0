"""Edges between the ops of a Program: pairs of arrays (source, target), where the source is before the target."""

from __future__ import annotations

import numpy as np

from treadle.ir.program import NEVER, Ints, Program


def need_edges(program: Program) -> tuple[Ints, Ints]:
    """List edges from each op that is waited for to the op that waits."""
    target = np.repeat(np.arange(program.num_ops, dtype=np.int32), np.diff(program.dep_ptr))
    real = program.dep != NEVER
    return program.dep[real], target[real]


def launch_edges(program: Program) -> tuple[Ints, Ints]:
    """List edges from each communication op to the one its rank launches next."""
    ops = np.flatnonzero(program.launch >= 0)
    rank = program.lane_rank[program.lane_of[ops]]
    order = ops[np.lexsort((program.launch[ops], rank))].astype(np.int32)
    same = np.diff(np.sort(rank)) == 0
    return order[:-1][same], order[1:][same]
