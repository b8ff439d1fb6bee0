"""The ops of a stream with routes: a lane to each peer and one from each, in matched steps.

device 0  h2d               h2d 0.0   h2d 1.0
          send to rank 1              bucket 0.0
          recv from rank 1            bucket 0.1
          reload                                 0.1
"""

from __future__ import annotations

import numpy as np

from treadle.ir.ops import UPDATE, LaneKind, OpKind
from treadle.ir.placement import Placement
from treadle.ir.program import NEVER, Ints, Layout, Longs, Program
from treadle.weights.bucket_stream import Stream
from treadle.weights.matched_steps import Hops

_OF_LANE = np.zeros(len(LaneKind), np.int64)
_OF_LANE[[kind.lane for kind in UPDATE]] = UPDATE


def layout_of(stream: Stream) -> Layout:
    """Return the devices and rounds of an update, in which nothing is computed."""
    rounds, devices = max(1, stream.num_rounds), stream.num_devices
    return Layout(Placement.loop(1), rounds, ("",), forward=(), backward=(), weights=(), dp=devices)


def targeted_ops(stream: Stream, hops: Hops) -> tuple[Program, Longs]:
    """Return the Program without what its ops wait for, and when ops come, by steps."""
    number, moves = np.arange(stream.num_buckets), hops.moves
    copied_to = (stream.round % max(1, stream.num_h2d)).astype(np.int32)
    held = np.where(hops.held == NEVER, copied_to[hops.bucket], hops.held)
    into = np.where(moves, hops.into, held)  # one that stays is reloaded from where it was copied to
    when = 2 * hops.step.astype(np.int64) + moves
    none = np.full(len(number) + len(into), NEVER)
    parts = {
        LaneKind.H2D: (number, stream.source, none[: len(number)], copied_to, number),
        LaneKind.SEND: [a[moves] for a in (hops.bucket, hops.sender, hops.receiver, held, when)],
        LaneKind.RECV: [a[moves] for a in (hops.bucket, hops.receiver, hops.sender, into, when)],
        LaneKind.RELOAD: (hops.bucket, hops.receiver, none[len(number) :], into, when),
    }
    lane_kind = np.repeat(list(map(int, parts)), [len(part[0]) for part in parts.values()])
    bucket, rank, peer, chunk, when = (np.concatenate([part[at] for part in parts.values()]) for at in range(5))
    order = np.lexsort((bucket, when, peer, lane_kind, rank))
    bucket, rank, peer, chunk, when, lane_kind = (a[order] for a in (bucket, rank, peer, chunk, when, lane_kind))
    kind = _OF_LANE[lane_kind]
    starts = np.flatnonzero(np.r_[len(kind) > 0, np.any([np.diff(a) != 0 for a in (rank, lane_kind, peer)], axis=0)])
    size = np.where(kind == OpKind.RELOAD, stream.taken_bytes[bucket, 0], stream.size_bytes[bucket])
    program = Program(
        layout=layout_of(stream),
        kind=kind.astype(np.uint8),
        mb=stream.round[bucket].astype(np.int32),
        chunk=chunk.astype(np.int16),
        layer=stream.source[bucket].astype(np.int16),
        cell=bucket.astype(np.int32),
        launch=np.full(len(kind), NEVER, np.int32),
        size_bytes=size.astype(np.int64),
        joined=np.zeros(len(kind), bool),
        lane_ptr=np.r_[starts, len(kind)].astype(np.int64),
        lane_rank=rank[starts].astype(np.int32),
        lane_kind=lane_kind[starts].astype(np.uint8),
        lane_peer=peer[starts].astype(np.int32),
        lane_group=_groups(rank[starts], lane_kind[starts], peer[starts], stream.num_devices),
        dep_ptr=np.zeros(len(kind) + 1, np.int64),
        dep=np.zeros(0, np.int32),
    )
    return program, when


def _groups(rank: Longs, lane_kind: Longs, peer: Longs, num_devices: int) -> Ints:
    """Number the channels: a send lane and the receive lane at its other end have one number."""
    sends, receives = lane_kind == LaneKind.SEND, lane_kind == LaneKind.RECV
    channel = np.where(sends, rank * num_devices + peer, peer * num_devices + rank)
    group = np.full(len(rank), NEVER, np.int32)
    group[sends | receives] = np.unique(channel[sends | receives], return_inverse=True)[1]
    return group


def step_turns(program: Program, when: Longs) -> tuple[Ints, Ints]:
    """Pairs (op, what it waits for): what a device sends and receives in a step waits for both of its step before."""
    ops = np.flatnonzero(np.isin(program.lane_kind[program.lane_of], (LaneKind.SEND, LaneKind.RECV)))
    rank, step = program.lane_rank[program.lane_of[ops]], when[ops]
    order = np.lexsort((step, rank))
    ops, rank, step = ops[order], rank[order], step[order]
    opens = np.flatnonzero(np.r_[len(ops) > 0, (np.diff(rank) != 0) | (np.diff(step) != 0)])
    ends = np.r_[opens[1:], len(ops)]
    pairs: list[tuple[int, int]] = []
    for before, (start, end) in enumerate(zip(opens[1:], ends[1:], strict=True)):
        if rank[start] == rank[opens[before]]:
            pairs += [(op, last) for op in ops[start:end] for last in ops[opens[before] : ends[before]]]
    both = np.array(pairs, np.int32).reshape(-1, 2)
    return both[:, 0], both[:, 1]
