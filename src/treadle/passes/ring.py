"""Receive rings: each channel has a number of receive buffers that it fills one after the other."""

from __future__ import annotations

import numpy as np

from treadle.ir.ops import LaneKind
from treadle.ir.program import Ints, Program
from treadle.passes.append import add_waits
from treadle.passes.edges import need_edges


def ring_edges(program: Program, ring: int) -> tuple[Ints, Ints]:
    """List edges from the reader of a receive to the receive `ring` places after it on the same lane."""
    source, target = need_edges(program)
    lane = program.lane_of
    read = program.lane_kind[lane[source]] == LaneKind.RECV
    recv, reader = source[read], target[read]
    later = recv + ring
    inside = later < program.lane_ptr[lane[recv] + 1]
    return reader[inside], later[inside].astype(np.int32)


def with_ring(program: Program, ring: int | None) -> Program:
    """Give each channel `ring` receive buffers: a receive waits for the reader that frees its buffer.

    None is a ring without an end, which changes nothing.
    """
    if ring is None:
        return program
    if ring < 1:
        raise ValueError(f"a ring has at least 1 buffer, got {ring}")
    freed_by, receive = ring_edges(program, ring)
    return add_waits(program, receive, freed_by)
