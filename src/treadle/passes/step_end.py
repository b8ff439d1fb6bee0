"""End a step: gradients are reduced and clipped, the optimizer runs, parameters are gathered.

REDUCE_GRAD   a chunk's gradients meet those of other pipelines once its last weight gradient is made, while other
              chunks are still at work. Where every stage lives on two ranks (DualPipe), the two ranks' DP lanes are a
              group, so that the copies' gradients meet, and both take their stages in the same order.
REDUCE_TIED   a parameter that several stages share, as embedding and head do, is in no chunk's reduction. It has one of
              its own over all ranks that hold it, on a lane whose peer is the number of the tie.
CLIP          waits for all gradients of its rank and their reductions; on all ranks together, as a norm over the whole
              model is.
OPTIMIZER     follows it, and GATHER_PARAMS the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treadle.ir.index import Index
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.placement import Placement
from treadle.ir.program import NEVER, Ints, Layout, Program
from treadle.passes.append import (
    LaneColumns,
    add_waits,
    append_lanes,
    append_ops,
    lanes_of,
    ops_of,
    ranks_of,
    step_lanes,
)


def reduces(placement: Placement, replicas: int) -> bool:
    """Return whether the gradients of a stage are summed over ranks: over replicas, or where two ranks hold a stage."""
    return replicas > 1 or placement.num_pipes > 1


def with_step_end(
    program: Program,
    *,
    reduce: bool = False,
    tied: tuple[tuple[int, ...], ...] = (),
    step_end: tuple[OpKind, ...] = (),
    moved: Mapping[OpKind, int] | None = None,
    index: Index | None = None,
) -> Program:
    """Append the ops that end a step to each rank of one pipeline.

    Args:
        program: of any grain, with its compute lanes first.
        reduce: add a REDUCE_GRAD for each chunk.
        tied: add a REDUCE_TIED for each of these sets of stages that share a parameter.
        step_end: add these, one of `treadle.ir.ops.STEP_ENDS`.
        moved: the bytes of an op by kind.
        index: of the program, if it was made already.

    """
    if not (reduce or tied or step_end):
        return program
    layout = replace(program.layout, tied=tied, step_end=step_end)
    last = (index or Index.of(program)).last_gradient.reshape(layout.placement.pp, layout.placement.vpp)
    order = _order(last, layout)
    program = append_lanes(replace(program, layout=layout), _lanes(layout, order if reduce else None), moved)
    if step_end:
        program = append_ops(program, lanes_of(program, LaneKind.COMPUTE), OpKind.OPTIMIZER)
        last = np.where(last >= 0, last + np.arange(len(last))[:, None], last)  # one more op on each lane before
    return _with_waits(program, last, np.take_along_axis(last, order, axis=1).reshape(-1))


def _order(last: Ints, layout: Layout) -> npt.NDArray[np.intp]:
    """Each rank's chunks in the order their gradients are done; two ranks with the same stages agree on the first's."""
    order = np.argsort(last, axis=1, kind="stable")
    if layout.placement.num_pipes == 1:
        return order
    stages = np.array(layout.placement.stages, np.int32)
    for rank in range((layout.placement.pp + 1) // 2):
        other = layout.placement.pp - 1 - rank
        wanted = stages[rank][order[rank]]
        order[other] = [int(np.flatnonzero(stages[other] == stage)[0]) for stage in wanted]
    return order


def _lanes(layout: Layout, order: npt.NDArray[np.intp] | None) -> list[LaneColumns]:
    """Return the lanes besides compute; those of reductions, in this order of chunks, end with GATHER_PARAMS."""
    pp, vpp = layout.placement.pp, layout.placement.vpp
    ranks = np.arange(pp, dtype=np.int32)
    gathers = [OpKind.GATHER_PARAMS] * (OpKind.GATHER_PARAMS in layout.step_end)
    lanes = []
    if order is not None:
        chunk = np.column_stack([order, *np.zeros((len(gathers), pp), np.int32)])
        copies = np.minimum(ranks, pp - 1 - ranks) if layout.placement.num_pipes > 1 else NEVER
        lanes.append(step_lanes(LaneKind.DP, ranks, [OpKind.REDUCE_GRAD] * vpp + gathers, chunk=chunk, group=copies))
    for number, shares in enumerate(_shares(layout)):
        holders = np.flatnonzero(shares.any(axis=1)).astype(np.int32)
        chunk = shares[holders].argmax(axis=1).reshape(-1, 1)
        tie = step_lanes(LaneKind.TIED, holders, [OpKind.REDUCE_TIED], chunk=chunk, layer=number, peer=number, group=0)
        lanes.append(tie)
    if OpKind.CLIP in layout.step_end:
        lanes.append(step_lanes(LaneKind.WORLD, ranks, [OpKind.CLIP], group=0))
    if gathers and order is None:
        lanes.append(step_lanes(LaneKind.DP, ranks, gathers))
    return lanes


def _shares(layout: Layout) -> list[npt.NDArray[np.bool_]]:
    """For each tie `[rank, chunk]`: does it hold the parameter."""
    return [np.isin(layout.placement.stages, stages) for stages in layout.tied]


def _with_waits(program: Program, last: Ints, last_in_order: Ints) -> Program:
    """Make each op wait for what it needs, from the last gradients of each rank's chunks on."""
    layout, pp = program.layout, program.layout.placement.pp
    reduces, ties = ops_of(program, OpKind.REDUCE_GRAD), ops_of(program, OpKind.REDUCE_TIED)
    clips, optimizers = ops_of(program, OpKind.CLIP), ops_of(program, OpKind.OPTIMIZER)
    gathers = ops_of(program, OpKind.GATHER_PARAMS)
    waits = [(reduces, last_in_order[: len(reduces)])]
    holders, tie = ranks_of(program, ties), program.layer[ties]
    for number, shares in enumerate(_shares(layout)):
        op, rank = ties[tie == number], holders[tie == number]
        waits.append((np.repeat(op, shares[rank].sum(axis=1)), last[rank][shares[rank]]))
    ends = np.full((pp, 3), NEVER, np.int32)  # the last gradient of each rank, its last reduction, that of a tie
    ends[:, 0] = last.max(axis=1)
    ends[ranks_of(program, reduces), 1] = reduces
    ends[holders, 2] = ties
    first = clips if len(clips) else optimizers
    if len(first):
        rank, which = np.nonzero(ends >= 0)
        waits.append((first[rank], ends[rank, which]))
    if len(clips):
        waits.append((optimizers, clips))
    if len(gathers):
        waits.append((gathers, optimizers))
    op, waits_for = (np.concatenate(column) for column in zip(*waits, strict=True))
    return add_waits(program, op, waits_for)
