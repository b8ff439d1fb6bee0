"""Crossings: what a rank makes and another reads, as the four ops of its message."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treadle.ir.ops import RECEIVES, LaneKind
from treadle.ir.program import Ints, Program


class Crossings(NamedTuple):
    """A row for each message: `maker[i]` computes it, `send[i]` and `recv[i]` carry it, `reader[i]` waits for it."""

    maker: Ints
    send: Ints
    recv: Ints
    reader: Ints


def crossings(program: Program) -> Crossings:
    """List the messages of a sound program, in the order of their readers."""
    send_of = _sends(program)
    reader = np.repeat(np.arange(program.num_ops, dtype=np.int32), np.diff(program.dep_ptr))
    received = np.isin(program.kind, RECEIVES)
    provided = program.dep >= 0
    reads = np.flatnonzero(provided & received[np.where(provided, program.dep, 0)])
    recv = program.dep[reads]
    send = send_of[recv]
    made = (send >= 0) & (program.dep_ptr[send + 1] > program.dep_ptr[send])
    recv, send, reader = recv[made], send[made], reader[reads][made]
    return Crossings(program.dep[program.dep_ptr[send]], send, recv, reader)


def _sends(program: Program) -> Ints:
    """`[recv op]` -> the send that goes with it, or -1."""
    send_of = np.full(program.num_ops, -1, np.int32)
    ptr, lanes = program.groups
    for start, stop in pairwise(ptr):
        members = lanes[start:stop]
        kinds = program.lane_kind[members]
        sends, recvs = members[kinds == LaneKind.SEND], members[kinds == LaneKind.RECV]
        if len(sends) != 1 or len(recvs) != 1:
            continue
        first, other = int(program.lane_ptr[sends[0]]), int(program.lane_ptr[recvs[0]])
        num = min(int(program.lane_ptr[lane + 1] - program.lane_ptr[lane]) for lane in (sends[0], recvs[0]))
        send_of[other : other + num] = np.arange(first, first + num)
    return send_of
