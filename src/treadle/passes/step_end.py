"""The end of a step behind a Program: gradients are clipped, the optimizer runs, parameters are gathered.

CLIP waits for all gradients of its rank and their reductions. It runs together on all ranks, as a norm over the whole
model does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.index import Index
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Program
from treadle.passes.append import NewLanes, append_lanes, append_ops, lanes_of, last_ops


def with_step_end(program: Program, step_end: tuple[OpKind, ...]) -> Program:
    """Add the ops that end a step to each rank of one pipeline."""
    if not step_end:
        return program
    program = replace(program, layout=replace(program.layout, step_end=step_end))
    waits = _gradients(program)
    if OpKind.CLIP in step_end:
        program = _with_lanes(program, LaneKind.WORLD, OpKind.CLIP, waits, together=True)
        waits = list(last_ops(program, lanes_of(program, LaneKind.WORLD)).reshape(-1, 1))
    compute = lanes_of(program, LaneKind.COMPUTE)
    program = append_ops(program, compute, OpKind.OPTIMIZER, waits)
    if OpKind.GATHER_PARAMS not in step_end:
        return program
    waits = list(last_ops(program, compute).reshape(-1, 1))
    reduces = lanes_of(program, LaneKind.DP)
    if len(reduces):
        return append_ops(program, reduces, OpKind.GATHER_PARAMS, waits)
    return _with_lanes(program, LaneKind.DP, OpKind.GATHER_PARAMS, waits, together=False)


def _gradients(program: Program) -> list[Ints]:
    """For each rank its last gradient, its last reduction and its last reduction of a tie, as far as there are any."""
    index, placement = Index.of(program), program.layout.placement
    gradients = index.last_gradient.reshape(placement.pp, placement.vpp).max(axis=1)
    ends = np.column_stack([gradients, index.last_of_rank[:, :2]]).astype(np.int32)
    return [row[row >= 0] for row in ends]


def _with_lanes(program: Program, lane: LaneKind, kind: OpKind, waits: list[Ints], *, together: bool) -> Program:
    pp = program.layout.placement.pp
    zeros = np.zeros(pp, np.int32)
    group = int(program.lane_group.max(initial=-1)) + 1
    new = NewLanes(
        lane=lane,
        rank=np.arange(pp, dtype=np.int32),
        peer=zeros + NEVER,
        group=zeros + (group if together else NEVER),
        count=zeros + 1,
        kind=kind,
        chunk=zeros,
        layer=zeros,
        waits=waits,
    )
    return append_lanes(program, new)
