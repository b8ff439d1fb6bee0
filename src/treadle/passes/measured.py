"""Schedule -> the Program of a measured step: all replicas, receives posted when they were, the ops around the cells.

    all-gather -> first F of its chunk ... last cell -> gc -> layer norms -> tied -> reduce-scatter -> clip -> optimizer

Megatron posts a receive when it has ended the computation before it: a receive waits for the computation of its kind
before its reader, and the first gradient's for the second forward before the first backward. Where messages of a
channel overtake each other, a receive is posted early enough for those after it. So the messages of the Program start
no earlier than those that were measured.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Program
from treadle.ir.schedule import Schedule
from treadle.passes.append import (
    LaneColumns,
    StepOp,
    add_waits,
    append_lanes,
    append_ops,
    lanes_of,
    last_ops,
    ops_of,
    ranks_of,
    step_lanes,
)
from treadle.passes.cells import lower_cells
from treadle.passes.mesh import spread

TAIL = (
    OpKind.GATHER_PARAMS,
    OpKind.GC,
    OpKind.REDUCE_LAYERNORM,
    OpKind.REDUCE_TIED,
    OpKind.REDUCE_GRAD,
    OpKind.CLIP,
    OpKind.OPTIMIZER,
)
"""The ops around the cells of a step, in order; GATHER_PARAMS comes before them."""


def measured_program(
    schedule: Schedule, *, dp: int = 1, tail: Collection[OpKind] = (), late_receives: bool = True
) -> Program:
    """Lower a schedule to cells on `dp` replicas, with those of the TAIL ops that were measured.

    GATHER_PARAMS and REDUCE_GRAD run over the replicas of a rank, one for each chunk; CLIP over all ranks; REDUCE_TIED
    over the first and the last stage of a replica. REDUCE_LAYERNORM runs over the tensor-parallel ranks, which are one
    rank here. `late_receives`: a receive is posted when the computation before it has ended; else ahead of time.
    """
    if set(tail) - set(TAIL):
        wrong = ", ".join(sorted(OpKind(kind).name for kind in set(tail) - set(TAIL)))
        raise ValueError(f"ops around the cells are {', '.join(kind.name for kind in TAIL)}, got {wrong}")
    program = lower_cells(schedule)
    if late_receives:
        program = _posted(program)
    if OpKind.GATHER_PARAMS in tail:
        program = _with_gather(program)
    for kind in TAIL[1:]:
        if kind in tail:
            program = _with_next(program, kind)
    ends = tuple(kind for kind in (OpKind.CLIP, OpKind.OPTIMIZER) if kind in tail and OpKind.OPTIMIZER in tail)
    ties = ((0, schedule.placement.num_stages - 1),) if OpKind.REDUCE_TIED in tail else ()
    tied = ties if schedule.placement.num_stages > 1 else ()
    program = replace(program, layout=replace(program.layout, step_end=ends, tied=tied))
    return _ties_of_replicas(spread(program, ep=1, dp=dp))


def _posted(program: Program) -> Program:
    """Make each receive wait for what its rank computes before it posts the receive."""
    reader = _readers(program)
    consumer, producer = [], []
    for lane in lanes_of(program, LaneKind.RECV):
        rank, needed = int(program.lane_rank[lane]), program.num_ops
        first = int(program.lane_ptr[rank])  # compute lanes come first, a rank each
        for op in range(int(program.lane_ptr[lane + 1]) - 1, int(program.lane_ptr[lane]) - 1, -1):
            if reader[op] == NEVER:
                continue
            needed = min(needed, int(reader[op]))
            before = _before(program, first, needed, forward=program.kind[op] == OpKind.RECV_F)
            if before != NEVER:
                consumer.append(op)
                producer.append(before)
    return add_waits(program, np.array(consumer, np.int32), np.array(producer, np.int32))


def _readers(program: Program) -> Ints:
    """Return for each op the first op of a compute lane that waits for it; of an overlapped pair its first half."""
    reader = np.full(program.num_ops, NEVER, np.int32)
    waiting = np.repeat(np.arange(program.num_ops, dtype=np.int32), np.diff(program.dep_ptr))
    known = (program.dep >= 0) & (program.lane_kind[program.lane_of[waiting]] == LaneKind.COMPUTE)
    opens = np.where(program.joined, 0, np.arange(program.num_ops))
    reader[program.dep[known][::-1]] = np.maximum.accumulate(opens)[waiting[known]][::-1]
    return reader


def _before(program: Program, first: int, needed: int, *, forward: bool) -> int:
    """Return the op of a row, which opens with `first`, that has ended when the receive for op `needed` is posted."""
    alike = (OpKind.F,) if forward else (OpKind.B, OpKind.I)
    for op in range(needed - 1, first - 1, -1):
        if program.kind[op] in alike:
            return op
    second = needed - 2
    return second if not forward and second >= first and program.kind[second] == OpKind.F else NEVER


def _first_forwards(program: Program) -> Ints:
    """`[rank, chunk]` -> the first forward of a chunk, or NEVER."""
    placement = program.layout.placement
    first = np.full((placement.pp, placement.vpp), NEVER, np.int32)
    forwards = np.flatnonzero(program.kind == OpKind.F)[::-1]  # backwards, so that the first one is what stays
    first[program.lane_rank[program.lane_of[forwards]], program.chunk[forwards]] = forwards
    return first


def _with_gather(program: Program) -> Program:
    """Add a DP lane to each rank, with the all-gather of each chunk, for which the chunk's first forward waits."""
    first = _first_forwards(program)
    chunks = np.argsort(np.where(first == NEVER, program.num_ops, first), axis=1, kind="stable")
    program = append_lanes(program, [_rank_lanes(program, OpKind.GATHER_PARAMS, chunks)])
    waiting = np.take_along_axis(first, chunks, axis=1).reshape(-1)
    return add_waits(program, waiting[waiting >= 0], ops_of(program, OpKind.GATHER_PARAMS)[waiting >= 0])


def _with_next(program: Program, kind: OpKind) -> Program:
    """Add an op, of REDUCE_GRAD one for each chunk, after the last op of each rank's chain."""
    if kind is OpKind.REDUCE_GRAD:
        return _with_reductions(program)
    if kind.lane is LaneKind.COMPUTE:
        return _with_last(program, kind)
    chain = _chain(program)
    lanes = _tie_lanes(program) if kind is OpKind.REDUCE_TIED else _rank_lanes(program, kind)
    program = append_lanes(program, [lanes])
    return add_waits(program, ops_of(program, kind), chain[lanes.rank])


def _with_last(program: Program, kind: OpKind) -> Program:
    """Add an op at the end of the lane that this kind runs on, after the last op of each rank's chain."""
    lanes = lanes_of(program, kind.lane)
    before = _chain(program)[program.lane_rank[lanes]]
    before += np.searchsorted(program.lane_ptr[lanes + 1], before, side="right").astype(np.int32)  # renumbered
    program = append_ops(program, lanes, kind)
    return add_waits(program, last_ops(program, lanes), before)


def _chain(program: Program) -> Ints:
    """Return the last op of each rank's chain: of those after its cells the one that came last, else its last cell."""
    chain = last_ops(program, lanes_of(program, LaneKind.COMPUTE))
    for kind in TAIL[1:]:
        ops = ops_of(program, kind)
        chain[ranks_of(program, ops)] = ops
    return chain


def _with_reductions(program: Program) -> Program:
    """Add the reduction of each chunk's gradients, the last chunk first, to the lane that has the all-gathers."""
    pp, vpp = program.layout.placement.pp, program.layout.placement.vpp
    chunks = np.tile(np.arange(vpp - 1, -1, -1), (pp, 1))
    if not len(lanes_of(program, LaneKind.DP)):
        chain = _chain(program)
        program = append_lanes(program, [_rank_lanes(program, OpKind.REDUCE_GRAD, chunks)])
        return add_waits(program, ops_of(program, OpKind.REDUCE_GRAD), np.repeat(chain, vpp))
    for _ in range(vpp):
        program = _with_last(program, OpKind.REDUCE_GRAD)
    chunk = program.chunk.copy()
    chunk[program.kind == OpKind.REDUCE_GRAD] = chunks.reshape(-1)
    return replace(program, chunk=chunk)


def _rank_lanes(program: Program, kind: OpKind, chunks: npt.NDArray[np.intp] | None = None) -> LaneColumns:
    """Return a lane for each rank with an op for each of its `chunks`, or one; CLIP runs on all ranks together."""
    ranks = np.arange(program.layout.placement.pp, dtype=np.int32)
    chunks = chunks if chunks is not None else np.zeros((len(ranks), 1), np.intp)
    group = 0 if kind is OpKind.CLIP else NEVER
    return step_lanes(
        kind.lane, ranks, [[StepOp(kind, chunk) for chunk in row] for row in chunks.tolist()], group=group
    )


def _tie_lanes(program: Program) -> LaneColumns:
    """Return the lanes for the reduction of what the first and the last stage share, on the ranks that hold them."""
    stages = np.array(program.layout.placement.stages, np.int32)
    ends = np.isin(stages, (0, stages.max()))
    ranks = np.flatnonzero(ends.any(axis=1)).astype(np.int32)
    chunks = ends[ranks].argmax(axis=1).reshape(-1, 1)
    ops = [[StepOp(OpKind.REDUCE_TIED, int(chunk))] for chunk in chunks.reshape(-1)]
    return step_lanes(LaneKind.TIED, ranks, ops, peer=0, group=0)


def _ties_of_replicas(program: Program) -> Program:
    """Put the tied lanes of each replica into a group of their own: their sums over replicas come with REDUCE_GRAD."""
    lanes = lanes_of(program, LaneKind.TIED)
    if not len(lanes):
        return program
    group = program.lane_group.copy()
    group[lanes] = int(group.max(initial=NEVER)) + 1 + program.lane_rank[lanes] % program.layout.num_replicas
    _, numbered = np.unique(group[group >= 0], return_inverse=True)
    group[group >= 0] = numbered
    return replace(program, lane_group=group.astype(np.int32))
