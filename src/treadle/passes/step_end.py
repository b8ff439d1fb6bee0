"""Begin and end a step: parameters are gathered; gradients are reduced and clipped, and the optimizer runs.

REDUCE_GRAD   a chunk's gradients meet those of other pipelines once its last weight gradient is made, while other
              chunks are still at work. Where every stage lives on two ranks (DualPipe), the two ranks' DP lanes are a
              group, so that the copies' gradients meet, and both take their stages in the same order.
REDUCE_SCATTER  of a bucket, a run of a stage's blocks, follows the last weight gradient of its blocks, and of those
              after them: the rest of the backward hides it.
GATHER_PARAMS of a bucket stands at the head of the DP lane, in the order in which forwards read the parameters; the
              first forward that does waits for it, so the warm-up hides the others.
REDUCE_TIED   a parameter that several stages share, as embedding and head do, is in no chunk's reduction. It has one of
              its own over all ranks that hold it, on a lane whose peer is the number of the tie.
CLIP          waits for all gradients of its rank and their reductions; on all ranks together, as a norm over the whole
              model is.
OPTIMIZER     follows it, and without buckets GATHER_PARAMS the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.index import Index
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.placement import Placement
from treadle.ir.program import NEVER, Ints, Layout, Program, Shorts
from treadle.passes.append import (
    LaneColumns,
    StepOp,
    add_waits,
    append_lanes,
    append_ops,
    lanes_of,
    ops_of,
    ranks_of,
    step_lanes,
)

Buckets: TypeAlias = tuple[tuple[int, ...], ...]


def reduces(placement: Placement, replicas: int) -> bool:
    """Return whether the gradients of a stage are summed over ranks: over replicas, or where two ranks hold a stage."""
    return replicas > 1 or placement.num_pipes > 1


def with_step_end(
    program: Program,
    *,
    reduce: bool = False,
    gather: bool = False,
    tied: tuple[tuple[int, ...], ...] = (),
    step_end: tuple[OpKind, ...] = (),
    buckets: Buckets = (),
    moved: Mapping[OpKind, int] | None = None,
    index: Index | None = None,
) -> Program:
    """Append the ops that begin and end a step to each rank of one pipeline.

    Args:
        program: of any grain, with its compute lanes first.
        reduce: add a REDUCE_GRAD for each chunk; with buckets a REDUCE_SCATTER for each bucket.
        gather: add a GATHER_PARAMS for each bucket.
        tied: add a REDUCE_TIED for each of these sets of stages that share a parameter.
        step_end: add these, one of `treadle.ir.ops.STEP_ENDS`.
        buckets: the first blocks of each stage's buckets, as in a Layout.
        moved: the bytes of an op by kind.
        index: of the program, if it was made already.

    """
    assert buckets or not gather, "parameters are gathered by bucket"
    if not (reduce or gather or tied or step_end):
        return program
    layout = replace(program.layout, tied=tied, step_end=step_end, buckets=buckets)
    program = replace(program, layout=layout)
    index = Index.of(program) if index is None or buckets else index
    last, reader = index.bounds.last_gradient, index.bounds.first_reader  # a compute lane is a rank here
    first_ops = _in_order(reader, layout) if gather else None
    last_ops = _in_order(last, layout) if reduce else None
    program = append_lanes(program, _lanes(layout, first_ops, last_ops), moved)
    if step_end:
        program = append_ops(program, lanes_of(program, LaneKind.COMPUTE), OpKind.OPTIMIZER)
        before = np.arange(len(last))[:, None, None]  # one more op on each lane before
        last, reader = (np.where(ops >= 0, ops + before, ops) for ops in (last, reader))
    return _with_waits(program, last, reader)


def _in_order(ops: Ints, layout: Layout) -> list[list[tuple[int, int]]]:
    """Return each rank's (chunk, bucket) in the order of these ops; of two with the same stages, in the first's order.

    `ops[rank, chunk, bucket]` is what one follows, or what waits for it.
    """
    stages, buckets = layout.placement.stages, layout.buckets
    order = [
        sorted(
            (
                (chunk, number)
                for chunk, stage in enumerate(held)
                for number in range(len(buckets[stage]) if buckets else 1)
            ),
            key=lambda place, rank=rank: int(ops[rank, *place]),  # type: ignore[misc]
        )
        for rank, held in enumerate(stages)
    ]
    for rank in range((len(stages) + 1) // 2 if layout.placement.num_pipes > 1 else 0):
        other = len(stages) - 1 - rank
        order[other] = [(stages[other].index(stages[rank][chunk]), number) for chunk, number in order[rank]]
    return order


def _lanes(
    layout: Layout, gathers: list[list[tuple[int, int]]] | None, reductions: list[list[tuple[int, int]]] | None
) -> list[LaneColumns]:
    """Return the lanes besides compute; those of reductions begin with gathers by bucket, or end with GATHER_PARAMS."""
    pp = layout.placement.pp
    ranks = np.arange(pp, dtype=np.int32)
    reduce = OpKind.REDUCE_SCATTER if layout.buckets else OpKind.REDUCE_GRAD
    last = [StepOp(OpKind.GATHER_PARAMS)] * (OpKind.GATHER_PARAMS in layout.step_end)
    dp = [
        [
            *(StepOp(OpKind.GATHER_PARAMS, *place) for place in (gathers[rank] if gathers else ())),
            *(StepOp(reduce, *place) for place in (reductions[rank] if reductions else ())),
            *last,
        ]
        for rank in range(pp)
    ]
    lanes = []
    if gathers or reductions:
        copies = np.minimum(ranks, pp - 1 - ranks) if layout.placement.num_pipes > 1 else NEVER
        lanes.append(step_lanes(LaneKind.DP, ranks, dp, group=copies))
    for number, shares in enumerate(_shares(layout)):
        holders = np.flatnonzero(shares.any(axis=1)).astype(np.int32)
        ops = [[StepOp(OpKind.REDUCE_TIED, int(chunk), number)] for chunk in shares[holders].argmax(axis=1)]
        lanes.append(step_lanes(LaneKind.TIED, holders, ops, peer=number, group=0))
    if OpKind.CLIP in layout.step_end:
        lanes.append(step_lanes(LaneKind.WORLD, ranks, [[StepOp(OpKind.CLIP)]] * pp, group=0))
    if last and not (gathers or reductions):
        lanes.append(step_lanes(LaneKind.DP, ranks, dp))
    return lanes


def _shares(layout: Layout) -> list[npt.NDArray[np.bool_]]:
    """For each tie `[rank, chunk]`: does it hold the parameter."""
    return [np.isin(layout.placement.stages, stages) for stages in layout.tied]


def _with_waits(program: Program, last: Ints, reader: Ints) -> Program:
    """Make each op wait for what it needs: reductions for each bucket's last gradient, first readers for gathers."""
    layout, pp = program.layout, program.layout.placement.pp
    reduces = ops_of(program, OpKind.REDUCE_SCATTER if layout.buckets else OpKind.REDUCE_GRAD)
    ties, gathers = ops_of(program, OpKind.REDUCE_TIED), ops_of(program, OpKind.GATHER_PARAMS)
    clips, optimizers = ops_of(program, OpKind.CLIP), ops_of(program, OpKind.OPTIMIZER)
    of_chunk = last.max(axis=2)
    waits = [(reduces, last[_places(program, reduces)])]
    holders, tie = ranks_of(program, ties), program.layer[ties]
    for number, shares in enumerate(_shares(layout)):
        op, rank = ties[tie == number], holders[tie == number]
        waits.append((np.repeat(op, shares[rank].sum(axis=1)), of_chunk[rank][shares[rank]]))
    ends = np.full((pp, 2), NEVER, np.int32)  # the last gradient of each rank, and its last reduction
    ends[:, 0] = of_chunk.max(axis=1)
    ends[ranks_of(program, reduces), 1] = reduces
    first = clips if len(clips) else optimizers
    if len(first):
        rank, which = np.nonzero(ends >= 0)
        waits += [(first[rank], ends[rank, which]), (first[holders], ties)]
    if len(clips):
        waits.append((optimizers, clips))
    if layout.buckets:
        waits.append((reader[_places(program, gathers)], gathers))
    elif len(gathers):
        waits.append((gathers, optimizers))
    op, waits_for = (np.concatenate(column) for column in zip(*waits, strict=True))
    return add_waits(program, op, waits_for)


def _places(program: Program, ops: Ints) -> tuple[Ints, Shorts, Shorts]:
    """Return rank, chunk and bucket of reductions or gathers; a chunk without buckets is one."""
    return ranks_of(program, ops), program.chunk[ops], program.layer[ops]
