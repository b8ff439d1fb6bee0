"""Ops behind those of a Program: lanes of their own at its end, or one more op at the end of lanes that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Program

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class NewLanes:
    """Lanes of one kind with ops of one kind: columns over lanes (`count` ops each), then columns over ops.

    `waits[i]` are the ops that op i waits for.
    """

    lane: LaneKind
    rank: Ints
    peer: Ints
    group: Ints
    count: Ints
    kind: OpKind
    chunk: Ints
    layer: Ints
    waits: list[Ints]
    size_bytes: int = 0


def append_lanes(program: Program, new: NewLanes) -> Program:
    """Add lanes behind those of a program. Their ops have neither micro-batch nor cell, and no launch number yet."""
    total = len(new.chunk)
    fill = np.full(total, NEVER, np.int32)
    ends = program.num_ops + np.cumsum(new.count, dtype=np.int64)
    dep_ends = len(program.dep) + np.cumsum([len(waits) for waits in new.waits], dtype=np.int64)
    return replace(
        program,
        kind=np.append(program.kind, np.full(total, new.kind, np.uint8)),
        mb=np.append(program.mb, fill),
        chunk=np.append(program.chunk, new.chunk.astype(np.int16)),
        layer=np.append(program.layer, new.layer.astype(np.int16)),
        cell=np.append(program.cell, fill),
        launch=np.append(program.launch, fill),
        size_bytes=np.append(program.size_bytes, np.full(total, new.size_bytes, np.int64)),
        joined=np.append(program.joined, np.zeros(total, bool)),
        lane_ptr=np.append(program.lane_ptr, ends),
        lane_rank=np.append(program.lane_rank, new.rank.astype(np.int32)),
        lane_kind=np.append(program.lane_kind, np.full(len(new.rank), new.lane, np.uint8)),
        lane_peer=np.append(program.lane_peer, new.peer.astype(np.int32)),
        lane_group=np.append(program.lane_group, new.group.astype(np.int32)),
        dep_ptr=np.append(program.dep_ptr, dep_ends),
        dep=np.concatenate([program.dep, *new.waits]).astype(np.int32),
    )


def append_ops(program: Program, lanes: Ints, kind: OpKind, waits: list[Ints], size_bytes: int = 0) -> Program:
    """Add one op at the end of each of these lanes, in order; `waits` are in numbers of ops of the program as it is."""
    at = program.lane_ptr[lanes + 1]
    number = np.arange(program.num_ops, dtype=np.int64)
    shifted = (number + np.searchsorted(at, number, side="right")).astype(np.int32)  # an op's number once they are in

    def with_new(column: npt.NDArray[Scalar], value: int) -> npt.NDArray[Scalar]:
        return np.insert(column, at, value).astype(column.dtype)

    moved = [shifted[ops] for ops in waits]
    old = np.where(program.dep < 0, program.dep, shifted[program.dep])
    counts = np.insert(np.diff(program.dep_ptr), at, [len(ops) for ops in waits])
    places = np.repeat(program.dep_ptr[at], [len(ops) for ops in waits])
    added = np.concatenate([np.empty(0, np.int32), *moved])
    behind = np.searchsorted(at, program.lane_ptr[1:], side="right")
    return replace(
        program,
        kind=with_new(program.kind, kind),
        mb=with_new(program.mb, NEVER),
        chunk=with_new(program.chunk, 0),
        layer=with_new(program.layer, 0),
        cell=with_new(program.cell, NEVER),
        launch=with_new(program.launch, NEVER),
        size_bytes=with_new(program.size_bytes, size_bytes),
        joined=np.insert(program.joined, at, False),
        lane_ptr=program.lane_ptr + np.r_[0, behind],
        dep_ptr=np.r_[0, np.cumsum(counts)].astype(np.int64),
        dep=np.insert(old, places, added).astype(np.int32),
    )


def lanes_of(program: Program, kind: LaneKind) -> Ints:
    """The lanes of a kind, in order."""
    found: Ints = np.flatnonzero(program.lane_kind == kind).astype(np.int32)
    return found


def last_ops(program: Program, lanes: Ints) -> Ints:
    """The last op of each lane; a lane without ops has none here."""
    filled = lanes[np.diff(program.lane_ptr)[lanes] > 0]
    last: Ints = (program.lane_ptr[filled + 1] - 1).astype(np.int32)
    return last
