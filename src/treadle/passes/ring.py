"""Receive rings: each channel has a number of receive buffers that it fills one after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.kernel import kernel
from treadle.ir.ops import LaneKind
from treadle.ir.program import Ints, Longs, Program
from treadle.passes.edges import need_edges


def ring_edges(program: Program, ring: int) -> tuple[Ints, Ints]:
    """List edges from the reader of a receive to the receive `ring` places behind it on the same lane."""
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
    return _with_deps(program, receive, freed_by)


def _with_deps(program: Program, op: Ints, waits_for: Ints) -> Program:
    """Add the dependency of `op[i]` on `waits_for[i]`; `op` may come in any order."""
    order = np.argsort(op, kind="stable")
    ptr = np.searchsorted(op[order], np.arange(program.num_ops + 1))
    dep_ptr, dep = _merged(program.dep_ptr, program.dep, ptr, waits_for[order])
    return replace(program, dep_ptr=dep_ptr, dep=dep)


@kernel
def _merged(ptr: Longs, dep: Ints, more_ptr: Longs, more: Ints) -> tuple[Longs, Ints]:
    """Append to the dependencies of each op those of another compressed list."""
    merged_ptr = ptr + more_ptr
    merged = np.empty(len(dep) + len(more), np.int32)
    for op in range(len(ptr) - 1):
        at = merged_ptr[op]
        for k in range(ptr[op], ptr[op + 1]):
            merged[at] = dep[k]
            at += 1
        for k in range(more_ptr[op], more_ptr[op + 1]):
            merged[at] = more[k]
            at += 1
    return merged_ptr, merged
