"""REDUCE_TIED ops behind a Program: the gradients of a parameter that several stages share, as embedding and head do.

Such a parameter is in no chunk's reduction. It has one of its own, over all ranks that hold it, once each of them has
made the last of its gradients. Each tie has lanes of its own; their peer is the number of the tie.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.index import Index
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.passes.append import NewLanes, append_lanes


def with_tied(program: Program, tied: tuple[tuple[int, ...], ...], size_bytes: int = 0) -> Program:
    """Add a lane for each tie to each rank of one pipeline that holds a stage of it, with its REDUCE_TIED."""
    program = replace(program, layout=replace(program.layout, tied=tied))
    placement = program.layout.placement
    stages = np.array(placement.stages, np.int32)
    for number, stages_of_tie in enumerate(tied):
        last = Index.of(program).last_gradient.reshape(placement.pp, placement.vpp)
        shares = np.isin(stages, stages_of_tie)
        ranks = np.flatnonzero(shares.any(axis=1)).astype(np.int32)
        group = int(program.lane_group.max(initial=-1)) + 1
        ones = np.ones(len(ranks), np.int32)
        new = NewLanes(
            lane=LaneKind.TIED,
            rank=ranks,
            peer=number * ones,
            group=group * ones,
            count=ones,
            kind=OpKind.REDUCE_TIED,
            chunk=shares[ranks].argmax(axis=1),
            layer=number * ones,
            waits=[last[rank][shares[rank]] for rank in ranks],
            size_bytes=size_bytes,
        )
        program = append_lanes(program, new)
    return program
