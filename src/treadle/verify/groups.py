"""Ops that go together: a send with its receive, a collective on all members. By place alone, there are no tags."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treadle.ir.kernel import kernel
from treadle.ir.program import Bytes, Ints, LaneKind, Longs, Op, OpKind, Program, Shorts
from treadle.verify.finding import MOST, Finding

_SEND, _RECV = int(LaneKind.SEND), int(LaneKind.RECV)
_SEND_F, _SEND_B = int(OpKind.SEND_F), int(OpKind.SEND_B)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)
_SURPLUS, _UNLIKE, _CROSSED = 0, 1, 2


def check_groups(program: Program) -> Iterator[Finding]:
    """T202, T204, T205: too few on one side, different kinds or sizes, different labels."""
    group_ptr, group_lane = program.groups
    stages = np.array(program.layout.placement.stages, np.int32)
    found, count = _check(
        program.kind,
        program.mb,
        program.chunk,
        program.layer,
        program.size_bytes,
        program.lane_ptr,
        program.lane_kind,
        program.lane_rank // program.layout.num_replicas,
        group_ptr,
        group_lane,
        stages,
        MOST,
    )
    tell = (_surplus, _unlike, _crossed)
    for what in range(3):
        for op, other in found[what, : min(MOST, int(count[what]))]:
            yield tell[what](program, program.op(int(op)), int(other))


def _place(program: Program, op: Op) -> int:
    return int(op.index - program.lane_ptr[program.lane_of[op.index]]) + 1


def _surplus(program: Program, op: Op, shortest: int) -> Finding:
    if op.kind.is_send or op.kind.is_recv:
        other = "receives" if op.kind.is_send else "sends"
        message = (
            f"{op} is number {_place(program, op)} on its channel, but rank {op.lane.peer} {other} only {shortest}"
        )
    else:
        message = f"{op} is number {_place(program, op)} of its group, but a member has only {shortest}"
    return Finding.at("T202", op, message)


def _unlike(program: Program, op: Op, other: int) -> Finding:
    with_op = program.op(other)
    sizes = int(program.size_bytes[other]), int(program.size_bytes[op.index])
    what = f"of {sizes[0]} and {sizes[1]} bytes" if sizes[0] != sizes[1] else "of different kinds"
    message = f"{op} meets {with_op} of rank {with_op.lane.rank}, {what}: neither ends"
    return Finding.at("T205", op, message)


def _crossed(program: Program, op: Op, other: int) -> Finding:
    sent = program.op(other)
    if op.kind.is_recv:
        message = (
            f"{op.label} is filled with {sent.label}: both are number {_place(program, op)} "
            f"on the channel from rank {sent.lane.rank}"
        )
    else:
        message = f"{op} meets {sent} of rank {sent.lane.rank}: both are number {_place(program, op)} of their group"
    return Finding.at("T204", op, message)


@kernel
def _check(
    kind: Bytes,
    mb: Ints,
    chunk: Shorts,
    layer: Shorts,
    size_bytes: Longs,
    lane_ptr: Longs,
    lane_kind: Bytes,
    lane_pp: Ints,
    group_ptr: Longs,
    group_lane: Ints,
    stages: Ints,
    most: int,
) -> tuple[Ints, Longs]:
    """For each of the three objections up to `most` ops, each with what it is held against."""
    found = np.empty((3, most, 2), np.int32)
    count = np.zeros(3, np.int64)
    num_chunks = stages.shape[1]
    for group in range(len(group_ptr) - 1):
        lanes = group_lane[group_ptr[group] : group_ptr[group + 1]]
        if len(lanes) == 0:
            continue
        shortest = lane_ptr[lanes[0] + 1] - lane_ptr[lanes[0]]
        for lane in lanes:
            shortest = min(shortest, lane_ptr[lane + 1] - lane_ptr[lane])
        for lane in lanes:
            for op in range(lane_ptr[lane] + shortest, lane_ptr[lane + 1]):
                if count[_SURPLUS] < most:
                    found[_SURPLUS, count[_SURPLUS], 0] = op
                    found[_SURPLUS, count[_SURPLUS], 1] = shortest
                count[_SURPLUS] += 1
        first = lanes[0]
        for lane in lanes[1:]:
            channel = lane_kind[first] == _SEND and lane_kind[lane] == _RECV
            for place in range(shortest):
                a, b = lane_ptr[first] + place, lane_ptr[lane] + place
                message = channel and (kind[a] == _SEND_F or kind[a] == _SEND_B)
                message = message and (kind[b] == _RECV_F or kind[b] == _RECV_B)
                what = -1
                if size_bytes[a] != size_bytes[b] or (kind[a] != kind[b] and not message):
                    what = _UNLIKE
                if what >= 0:
                    if count[what] < most:
                        found[what, count[what], 0] = b
                        found[what, count[what], 1] = a
                    count[what] += 1
                differ = mb[a] != mb[b]
                if channel:
                    carried = (kind[a] - _SEND_F) % 2 if _SEND_F <= kind[a] <= _RECV_B else kind[a] + 2
                    expected = (kind[b] - _SEND_F) % 2 if _SEND_F <= kind[b] <= _RECV_B else kind[b] + 2
                    differ = differ or chunk[a] != chunk[b] or carried != expected
                else:
                    one = stages[lane_pp[first], chunk[a]] if 0 <= chunk[a] < num_chunks else -1
                    two = stages[lane_pp[lane], chunk[b]] if 0 <= chunk[b] < num_chunks else -1
                    differ = differ or layer[a] != layer[b] or one != two
                if differ:
                    if count[_CROSSED] < most:
                        found[_CROSSED, count[_CROSSED], 0] = b
                        found[_CROSSED, count[_CROSSED], 1] = a
                    count[_CROSSED] += 1
    return found, count
