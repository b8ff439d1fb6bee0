"""Ops that go together: a send with its receive, a collective on all members. By place alone, there are no tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from treadle.ir.columns import GroupTable
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import BUCKET_OPS, LaneKind, OpKind, OpRole, column
from treadle.ir.program import Bools, Bytes, Ints, Longs, Op, Program, Shorts
from treadle.verifier.finding import MOST, Finding

_SEND, _RECV = int(LaneKind.SEND), int(LaneKind.RECV)
_SEND_F, _SEND_B = int(OpKind.SEND_F), int(OpKind.SEND_B)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)
_ACROSS: Bools = column(lambda kind: kind.lane is LaneKind.TIED or kind.role is OpRole.STEP_END, np.bool_)
"""`[kind]`: do ranks of different stages meet in it."""
_SEND_BUCKET, _RECV_BUCKET = int(OpKind.SEND_BUCKET), int(OpKind.RECV_BUCKET)
_SURPLUS, _UNLIKE, _CROSSED = 0, 1, 2


def check_groups(program: Program) -> Iterator[Finding]:
    """T202, T204, T205: too few on one side, different kinds or sizes, different labels."""
    across = _ACROSS
    if program.layout.buckets:
        across = np.where(np.isin(np.arange(len(OpKind)), BUCKET_OPS), False, _ACROSS)
    meeting = _Meeting(
        program.kind,
        program.mb,
        program.chunk,
        program.layer,
        program.size_bytes,
        program.lane_kind,
        program.lane_rank // program.layout.num_replicas,
        np.array(program.layout.placement.stages, np.int32),
        across,
    )
    found, count = _check(meeting, program.lane_ptr, GroupTable.of(program), MOST)
    make = (_surplus, _unlike, _crossed)
    for what in range(3):
        for op, other in found[what, : min(MOST, int(count[what]))]:
            yield make[what](program, program.op(int(op)), int(other))


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


class _Meeting(NamedTuple):
    """Columns in which ops that go together are compared: columns over ops, columns over lanes, `stages[pp, chunk]`.

    `across[kind]`: ranks of different stages meet in such an op.
    """

    kind: Bytes
    mb: Ints
    chunk: Shorts
    layer: Shorts
    size_bytes: Longs
    lane_kind: Bytes
    lane_pp: Ints
    stages: Ints
    across: Bools


@kernel
def _check(meeting: _Meeting, lane_ptr: Longs, groups: GroupTable, most: int) -> tuple[Ints, Longs]:
    """List for each objection up to `most` pairs (op, what it is held against), and count all."""
    found = np.zeros((3, most, 2), np.int32)
    count = np.zeros(3, np.int64)
    for group in range(len(groups.ptr) - 1):
        lanes = groups.lane[groups.ptr[group] : groups.ptr[group + 1]]
        shortest = _shortest(lane_ptr, lanes)
        for lane in lanes:
            for op in range(lane_ptr[lane] + shortest, lane_ptr[lane + 1]):
                _note(found, count, _SURPLUS, op, shortest)
        for other in lanes[1:]:
            first, lane = lanes[0], other
            if meeting.lane_kind[first] == _RECV:
                first, lane = lane, first  # a send is named by its receive, in whatever order lanes are stored
            ends = meeting.lane_kind[first], meeting.lane_kind[lane]
            channel = ends == (_SEND, _RECV)
            for place in range(shortest):
                a, b = lane_ptr[first] + place, lane_ptr[lane] + place
                if _are_unlike(meeting, a, b, channel):
                    _note(found, count, _UNLIKE, b, a)
                crossed = _carry_different(meeting, a, b) if channel else _are_of_different(meeting, first, lane, a, b)
                if crossed:
                    _note(found, count, _CROSSED, b, a)
    return found, count


@inlined
def _shortest(lane_ptr: Longs, lanes: Ints) -> int:
    """Return the number of ops of the shortest lane; 0 if there are no lanes."""
    shortest = lane_ptr[lanes[0] + 1] - lane_ptr[lanes[0]] if len(lanes) else 0
    for lane in lanes:
        shortest = min(shortest, lane_ptr[lane + 1] - lane_ptr[lane])
    return shortest


@inlined
def _note(found: Ints, count: Longs, objection: int, op: int, other: int) -> None:
    """Keep an op and what it is held against, while there is room."""
    if count[objection] < found.shape[1]:
        found[objection, count[objection], 0] = op
        found[objection, count[objection], 1] = other
    count[objection] += 1


@inlined
def _are_unlike(meeting: _Meeting, a: int, b: int, channel: bool) -> bool:
    """True if the two ops differ in size or kind; on a channel a send and a receive are alike."""
    one, two = meeting.kind[a], meeting.kind[b]
    message = channel and one in (_SEND_F, _SEND_B) and two in (_RECV_F, _RECV_B)
    bucket = one in (_SEND_BUCKET, _RECV_BUCKET) and two in (_SEND_BUCKET, _RECV_BUCKET)
    message = message or (channel and bucket)
    return meeting.size_bytes[a] != meeting.size_bytes[b] or (one != two and not message)


@inlined
def _carry_different(meeting: _Meeting, a: int, b: int) -> bool:
    """True if a send and its receive name different messages. Of a bucket they name different buffers."""
    if meeting.kind[a] in (_SEND_BUCKET, _RECV_BUCKET) and meeting.kind[b] in (_SEND_BUCKET, _RECV_BUCKET):
        differ: bool = meeting.mb[a] != meeting.mb[b] or meeting.layer[a] != meeting.layer[b]
        return differ
    one, two = _message(meeting.kind[a]), _message(meeting.kind[b])
    return meeting.mb[a] != meeting.mb[b] or meeting.chunk[a] != meeting.chunk[b] or one != two


@inlined
def _message(kind: int) -> int:
    """0 for an activation, 1 for a gradient, more for an op that is no message."""
    return (kind - _SEND_F) % 2 if _SEND_F <= kind <= _RECV_B else kind + 2


@inlined
def _are_of_different(meeting: _Meeting, lane_a: int, lane_b: int, a: int, b: int) -> bool:
    """True if two members of a collective are at different micro-batches, layers or stages."""
    one, two = _stage(meeting, lane_a, a), _stage(meeting, lane_b, b)
    return meeting.mb[a] != meeting.mb[b] or meeting.layer[a] != meeting.layer[b] or one != two


@inlined
def _stage(meeting: _Meeting, lane: int, op: int) -> int:
    """The stage that an op works for, -1 if its rank has no such chunk, -2 where ranks of different stages meet."""
    if meeting.across[meeting.kind[op]]:
        return -2
    chunk, stages = meeting.chunk[op], meeting.stages
    return stages[meeting.lane_pp[lane], chunk] if 0 <= chunk < stages.shape[1] else -1
