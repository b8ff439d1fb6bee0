"""REDUCE_GRAD ops behind a Program of any grain: gradients meet those of other pipelines, and of a stage's other copy.

A chunk's gradients can be reduced once its last weight gradient is made, while other chunks are still at work. Where
every stage lives on two ranks (DualPipe), the two ranks' lanes are one group, so that the copies' gradients meet, and
both take their stages in the same order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.index import Index
from treadle.ir.program import NEVER, Ints, LaneKind, Layout, OpKind, Program


def with_reduce(program: Program, size_bytes: int = 0) -> Program:
    """Add a DP lane to each rank of one pipeline, with a REDUCE_GRAD for each of its chunks."""
    layout = program.layout
    pp, vpp = layout.placement.pp, layout.placement.vpp
    last = Index.of(program).last_gradient.reshape(pp, vpp).astype(np.int32)
    order = _order(last, layout)
    total, ranks = pp * vpp, np.arange(pp, dtype=np.int32)
    made = np.take_along_axis(last, order, axis=1).reshape(-1)
    alone = np.full(pp, NEVER, np.int32)
    groups = int(program.lane_group.max(initial=-1)) + 1
    copies = groups + np.minimum(ranks, pp - 1 - ranks) if layout.placement.num_pipes > 1 else alone
    fill = np.full(total, NEVER, np.int32)
    lane_ptr = program.num_ops + np.arange(1, pp + 1, dtype=np.int64) * vpp
    dep_ptr = len(program.dep) + np.arange(1, total + 1, dtype=np.int64)
    return replace(
        program,
        kind=np.append(program.kind, np.full(total, OpKind.REDUCE_GRAD, np.uint8)),
        mb=np.append(program.mb, fill),
        chunk=np.append(program.chunk, order.reshape(-1).astype(np.int16)),
        layer=np.append(program.layer, np.zeros(total, np.int16)),
        cell=np.append(program.cell, fill),
        launch=np.append(program.launch, fill),
        size_bytes=np.append(program.size_bytes, np.full(total, size_bytes, np.int64)),
        joined=np.append(program.joined, np.zeros(total, bool)),
        lane_ptr=np.append(program.lane_ptr, lane_ptr),
        lane_rank=np.append(program.lane_rank, ranks),
        lane_kind=np.append(program.lane_kind, np.full(pp, LaneKind.DP, np.uint8)),
        lane_peer=np.append(program.lane_peer, alone),
        lane_group=np.append(program.lane_group, copies).astype(np.int32),
        dep_ptr=np.append(program.dep_ptr, dep_ptr),
        dep=np.append(program.dep, made),
    )


def _order(last: Ints, layout: Layout) -> Ints:
    """Each rank's chunks in the order their gradients are done; two ranks with the same stages agree on the first's."""
    order = np.argsort(last, axis=1, kind="stable").astype(np.int32)
    if layout.placement.num_pipes == 1:
        return order
    stages = np.array(layout.placement.stages, np.int32)
    for rank in range((layout.placement.pp + 1) // 2):
        other = layout.placement.pp - 1 - rank
        wanted = stages[rank][order[rank]]
        order[other] = [int(np.flatnonzero(stages[other] == stage)[0]) for stage in wanted]
    return order
