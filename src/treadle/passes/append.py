"""Append ops to a Program, on new lanes or at the end of existing ones, and dependencies to its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Bytes, Ints, Longs, Program, Shorts

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class LaneColumns:
    """Lanes with their ops: columns over ops, lane by lane, then columns over lanes.

    `num_ops[l]` are the ops of lane l. Lanes with the same `group` do their ops together; groups are numbered from 0
    among these lanes, and NEVER is a lane on its own.
    """

    kind: Bytes
    mb: Ints
    chunk: Shorts
    layer: Shorts
    cell: Ints
    num_ops: Longs
    rank: Ints
    lane: Bytes
    peer: Ints
    group: Ints


class StepOp(NamedTuple):
    """An op that belongs to the step and to no micro-batch; `layer` is the number of its bucket or tie."""

    kind: OpKind
    chunk: int = 0
    layer: int = 0


def step_lanes(
    lane: LaneKind,
    ranks: Ints,
    ops: Sequence[Sequence[StepOp]],
    *,
    peer: int = NEVER,
    group: npt.NDArray[np.integer[Any]] | int = NEVER,
) -> LaneColumns:
    """Return a lane for each of `ranks` with its ops; `group` is one for all lanes, or `[rank]`."""
    columns = np.array([op for row in ops for op in row], np.int64).reshape(-1, 3)
    num_ops = np.array([len(row) for row in ops], np.int64)
    return LaneColumns(
        kind=columns[:, 0].astype(np.uint8),
        mb=np.full(len(columns), NEVER, np.int32),
        chunk=columns[:, 1].astype(np.int16),
        layer=columns[:, 2].astype(np.int16),
        cell=np.full(len(columns), NEVER, np.int32),
        num_ops=num_ops,
        rank=ranks.astype(np.int32),
        lane=np.full(len(ranks), lane, np.uint8),
        peer=np.full(len(ranks), peer, np.int32),
        group=np.broadcast_to(group, len(ranks)).astype(np.int32),
    )


def append_lanes(program: Program, lanes: Sequence[LaneColumns], moved: Mapping[OpKind, int] | None = None) -> Program:
    """Append lanes; their ops wait for nothing yet and have no launch number. `moved` is the bytes of ops by kind."""
    if not lanes:
        return program
    groups, next_group = [program.lane_group], int(program.lane_group.max(initial=NEVER)) + 1
    for new in lanes:
        groups.append(np.where(new.group >= 0, new.group + next_group, NEVER).astype(np.int32))
        next_group = max(next_group, int(groups[-1].max(initial=NEVER)) + 1)
    num_ops = np.concatenate([new.num_ops for new in lanes])
    total = int(num_ops.sum())
    kind = np.concatenate([program.kind, *(new.kind for new in lanes)])
    sizes = np.array([(moved or {}).get(op_kind, 0) for op_kind in OpKind], np.int64)

    def column(name: str) -> npt.NDArray[Scalar]:
        return np.concatenate([getattr(program, name), *(getattr(new, name) for new in lanes)])

    def lane_column(name: str) -> npt.NDArray[Scalar]:
        return np.concatenate([getattr(program, f"lane_{name}"), *(getattr(new, name) for new in lanes)])

    def filled(column: npt.NDArray[Scalar], value: Longs | int) -> npt.NDArray[Scalar]:
        longer = np.zeros(len(column) + total, column.dtype)
        longer[: len(column)] = column
        if isinstance(value, np.ndarray) or value:  # zeros are there already, and cost nothing
            longer[len(column) :] = value
        return longer

    return replace(
        program,
        kind=kind,
        mb=column("mb"),
        chunk=column("chunk"),
        layer=column("layer"),
        cell=column("cell"),
        launch=filled(program.launch, NEVER),
        size_bytes=filled(program.size_bytes, sizes[kind[program.num_ops :]]),
        joined=filled(program.joined, 0),
        lane_ptr=np.append(program.lane_ptr, program.num_ops + np.cumsum(num_ops)),
        lane_rank=lane_column("rank"),
        lane_kind=np.concatenate([program.lane_kind, *(new.lane for new in lanes)]),
        lane_peer=lane_column("peer"),
        lane_group=np.concatenate(groups),
        dep_ptr=filled(program.dep_ptr, len(program.dep)),
    )


def append_ops(program: Program, lanes: Ints, kind: OpKind, size_bytes: int = 0) -> Program:
    """Append an op to each of these lanes, which are in order; it waits for nothing yet. Later ops are renumbered."""
    at = program.lane_ptr[lanes + 1]
    added_before = np.repeat(np.arange(len(at) + 1, dtype=np.int32), np.diff(np.r_[0, at, program.num_ops]))
    provided = program.dep >= 0
    dep = np.where(provided, program.dep + added_before[np.where(provided, program.dep, 0)], program.dep)

    def inserted(column: npt.NDArray[Scalar], values: Longs | int) -> npt.NDArray[Scalar]:
        new = np.broadcast_to(values, len(at)).astype(column.dtype).reshape(-1, 1)
        *pieces, rest = np.split(column, at)
        return np.concatenate([*(part for pair in zip(pieces, new, strict=True) for part in pair), rest])

    return replace(
        program,
        kind=inserted(program.kind, kind),
        mb=inserted(program.mb, NEVER),
        chunk=inserted(program.chunk, 0),
        layer=inserted(program.layer, 0),
        cell=inserted(program.cell, NEVER),
        launch=inserted(program.launch, NEVER),
        size_bytes=inserted(program.size_bytes, size_bytes),
        joined=inserted(program.joined, 0),
        lane_ptr=program.lane_ptr + np.r_[0, np.searchsorted(at, program.lane_ptr[1:], side="right")],
        dep_ptr=inserted(program.dep_ptr, program.dep_ptr[at]),
        dep=dep.astype(np.int32),
    )


def add_waits(program: Program, op: Ints, waits_for: Ints) -> Program:
    """Make op `op[i]` wait for op `waits_for[i]` besides what it waits for already; ops may come in any order."""
    order = np.argsort(op, kind="stable")
    op, waits_for = op[order], waits_for[order]
    added = np.cumsum(np.bincount(op, minlength=program.num_ops))
    return replace(
        program,
        dep_ptr=program.dep_ptr + np.r_[0, added],
        dep=np.insert(program.dep, program.dep_ptr[op + 1], waits_for).astype(np.int32),
    )


def lanes_of(program: Program, kind: LaneKind) -> Ints:
    """Return the lanes of a kind, in order."""
    found: Ints = np.flatnonzero(program.lane_kind == kind).astype(np.int32)
    return found


def ops_of(program: Program, kind: OpKind) -> Ints:
    """Return the ops of a kind, in order."""
    found: Ints = np.flatnonzero(program.kind == kind).astype(np.int32)
    return found


def ranks_of(program: Program, ops: Ints) -> Ints:
    """Return the rank of each of these ops."""
    ranks: Ints = program.lane_rank[np.searchsorted(program.lane_ptr, ops, side="right") - 1]
    return ranks


def last_ops(program: Program, lanes: Ints) -> Ints:
    """Return the last op of each lane; a lane without ops has none here."""
    filled = lanes[np.diff(program.lane_ptr)[lanes] > 0]
    last: Ints = (program.lane_ptr[filled + 1] - 1).astype(np.int32)
    return last
