"""A Program: ops on lanes, for every rank, in columns.

A lane is an in-order queue. Ops are stored lane by lane, in order, so the op before `i` on its lane is `i - 1`
unless `i` opens the lane. What an op waits for besides is in `dep`: a compressed list of op indices for each op,
where NEVER stands for something that no op provides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]

NEVER = -1


class OpKind(IntEnum):
    """What an op does. The first four are Kind's."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's own name
    W = 3
    SEND_F = 4
    SEND_B = 5
    RECV_F = 6
    RECV_B = 7

    @property
    def is_send(self) -> bool:
        """Does it hand a message to a peer."""
        return self in (OpKind.SEND_F, OpKind.SEND_B)

    @property
    def is_recv(self) -> bool:
        """Does it take a message from a peer."""
        return self in (OpKind.RECV_F, OpKind.RECV_B)


class LaneKind(IntEnum):
    """What a lane is a queue of."""

    COMPUTE = 0
    SEND = 1
    RECV = 2


@dataclass(frozen=True)
class Lane:
    """An in-order queue of a rank; `peer` is the other end of its channel, or -1."""

    rank: int
    kind: LaneKind
    peer: int

    def __str__(self) -> str:
        if self.kind is LaneKind.COMPUTE:
            return f"rank {self.rank} compute"
        preposition = "to" if self.kind is LaneKind.SEND else "from"
        return f"rank {self.rank} {self.kind.name.lower()} {preposition} rank {self.peer}"


@dataclass(frozen=True)
class Op:
    """One op as a person sees it."""

    index: int
    kind: OpKind
    lane: Lane
    mb: int
    chunk: int
    cell: int

    @property
    def label(self) -> str:
        """The action, or the message: `F3.1`."""
        return f"{self.kind.name[-1]}{self.mb}.{self.chunk}"

    def __str__(self) -> str:
        if self.kind.is_send:
            return f"send {self.label} to rank {self.lane.peer}"
        if self.kind.is_recv:
            return f"receive {self.label} from rank {self.lane.peer}"
        return self.label


@dataclass(frozen=True, eq=False)
class Program:
    """Columns over ops (kind, mb, chunk, cell, joined), over lanes (rank, kind, peer), and dependencies.

    `joined[i]`: op i starts and ends together with op i - 1 of its lane (the halves of an overlapped cell).
    `cell[i]`: which cell of its rank's row an op belongs to, or -1.
    """

    kind: Bytes
    mb: Ints
    chunk: Ints
    cell: Ints
    joined: Bools
    lane_ptr: Longs
    lane_rank: Ints
    lane_kind: Bytes
    lane_peer: Ints
    dep_ptr: Longs
    dep: Ints

    @property
    def num_ops(self) -> int:
        """Ops over all ranks."""
        return len(self.kind)

    @property
    def num_lanes(self) -> int:
        """Lanes over all ranks."""
        return len(self.lane_rank)

    @cached_property
    def lane_of(self) -> Ints:
        """The lane of each op."""
        return np.repeat(np.arange(self.num_lanes, dtype=np.int32), np.diff(self.lane_ptr))

    def lane(self, index: int) -> Lane:
        """A lane as a person sees it."""
        return Lane(int(self.lane_rank[index]), LaneKind(int(self.lane_kind[index])), int(self.lane_peer[index]))

    def op(self, index: int) -> Op:
        """An op as a person sees it."""
        lane = int(np.searchsorted(self.lane_ptr, index, side="right")) - 1
        return Op(
            index,
            OpKind(int(self.kind[index])),
            self.lane(lane),
            int(self.mb[index]),
            int(self.chunk[index]),
            int(self.cell[index]),
        )

    def deps(self, index: int) -> list[int]:
        """What an op waits for besides its lane."""
        return [int(d) for d in self.dep[self.dep_ptr[index] : self.dep_ptr[index + 1]]]
