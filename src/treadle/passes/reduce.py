"""REDUCE_GRAD ops behind a Program of any grain: gradients meet those of other pipelines, and of a stage's other copy.

A chunk's gradients can be reduced once its last weight gradient is made, while other chunks are still at work. Where
every stage lives on two ranks (DualPipe), the two ranks' lanes are one group, so that the copies' gradients meet, and
both take their stages in the same order.
"""

from __future__ import annotations

import numpy as np

from treadle.ir.index import Index
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Layout, Program
from treadle.passes.append import NewLanes, append_lanes


def with_reduce(program: Program, size_bytes: int = 0) -> Program:
    """Add a DP lane to each rank of one pipeline, with a REDUCE_GRAD for each of its chunks."""
    layout = program.layout
    pp, vpp = layout.placement.pp, layout.placement.vpp
    last = Index.of(program).last_gradient.reshape(pp, vpp).astype(np.int32)
    order = _order(last, layout)
    ranks = np.arange(pp, dtype=np.int32)
    alone = np.full(pp, NEVER, np.int32)
    groups = int(program.lane_group.max(initial=-1)) + 1
    new = NewLanes(
        lane=LaneKind.DP,
        rank=ranks,
        peer=alone,
        group=groups + np.minimum(ranks, pp - 1 - ranks) if layout.placement.num_pipes > 1 else alone,
        count=np.full(pp, vpp, np.int32),
        kind=OpKind.REDUCE_GRAD,
        chunk=order.reshape(-1),
        layer=np.zeros(pp * vpp, np.int32),
        waits=list(np.take_along_axis(last, order, axis=1).reshape(-1, 1)),
        size_bytes=size_bytes,
    )
    return append_lanes(program, new)


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
