"""One order over a step, as torch.distributed.pipelining makes it of a schedule without messages.

Rank after rank does its next cell if what it reads has been sent, over and over. A message stands behind the cell that
makes it on both of its ranks. Whatever channels share, such an order ends: each rank's is its part of one order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.ir.execute import leaders
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.passes.edges import need_edges


class _Cells(NamedTuple):
    """The cells of each rank, ops `begin[r]` to `end[r]`, with what they read; the message an op makes, both ends."""

    begin: Longs
    end: Longs
    joined: Bools
    dep_ptr: Longs
    dep: Ints
    send: Ints
    receive: Ints


def torch_turns(program: Program) -> Ints | None:
    """Return the place of each op's cell or message in this order; None if the program does not finish.

    `program` is at the grain of cells.
    """
    kind = program.lane_kind[program.lane_of]
    compute = np.flatnonzero(program.lane_kind == LaneKind.COMPUTE)
    compute = compute[np.argsort(program.lane_rank[compute], kind="stable")]
    source, target = need_edges(program)
    sends = kind[target] == LaneKind.SEND
    made = np.full(program.num_ops, NEVER, np.int32)
    made[source[sends]] = target[sends]
    lead = leaders(program)
    partner = np.full(program.num_ops, NEVER, np.int32)
    follows = np.flatnonzero((lead != np.arange(program.num_ops)) & (kind != LaneKind.COMPUTE))
    partner[follows], partner[lead[follows]] = lead[follows], follows
    receive = np.where(made == NEVER, NEVER, partner[made])
    begin, end = program.lane_ptr[compute], program.lane_ptr[compute + 1]
    turns = _rounds(_Cells(begin, end, program.joined, program.dep_ptr, program.dep, made, receive))
    return turns if (turns >= 0).all() else None


@kernel
def _rounds(cells: _Cells) -> Ints:
    turns = np.full(len(cells.joined), -1, np.int32)
    at, turn, moved = cells.begin.copy(), 0, True
    while moved:
        moved = False
        for rank in range(len(at)):
            begin = end = at[rank]
            while end < cells.end[rank] and (end == begin or cells.joined[end]):
                end += 1
            if begin == end or not _ready(cells, turns, begin, end):
                continue
            turns[begin:end] = turn
            turn += 1
            for op in range(begin, end):
                if cells.send[op] >= 0:
                    turns[cells.send[op]] = turn
                    if cells.receive[op] >= 0:
                        turns[cells.receive[op]] = turn
                    turn += 1
            at[rank], moved = end, True
    return turns


@inlined
def _ready(cells: _Cells, turns: Ints, begin: int, end: int) -> bool:
    for at in range(cells.dep_ptr[begin], cells.dep_ptr[end]):
        need = cells.dep[at]
        if need < 0 or turns[need] < 0:
            return False
    return True
