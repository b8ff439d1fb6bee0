"""The ops of a stream with destinations: a lane to each peer and one from each, in matched steps.

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
from treadle.weights.bucket_stream import Stream, matched_steps

_OF_LANE = np.zeros(len(LaneKind), np.int64)
_OF_LANE[[kind.lane for kind in UPDATE]] = UPDATE


def layout_of(stream: Stream) -> Layout:
    """Return the devices and rounds of an update, in which nothing is computed."""
    rounds, devices = max(1, stream.num_rounds), stream.num_devices
    return Layout(Placement.loop(1), rounds, ("",), forward=(), backward=(), weights=(), dp=devices)


def targeted_ops(stream: Stream, dest: Ints) -> Program:
    """Return the Program without what its ops wait for."""
    number, source = np.arange(stream.num_buckets), stream.source
    moved = np.flatnonzero(source != dest)
    copied_to = stream.round % max(1, stream.num_h2d)
    into = copied_to.copy()  # one that stays is reloaded from where it was copied to
    into[moved] = _nth(dest[moved]) % stream.num_ipc
    none = np.full(len(number), NEVER)
    parts = [
        (LaneKind.H2D, number, source, none, copied_to),
        (LaneKind.SEND, moved, source[moved], dest[moved], copied_to[moved]),
        (LaneKind.RECV, moved, dest[moved], source[moved], into[moved]),
        (LaneKind.RELOAD, number, dest, none, into),
    ]
    lane_kind = np.concatenate([np.full(len(part[1]), int(part[0])) for part in parts])
    bucket, rank, peer, chunk = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3, 4))
    order = np.lexsort((bucket, peer, lane_kind, rank))
    bucket, rank, peer, chunk, lane_kind = (a[order] for a in (bucket, rank, peer, chunk, lane_kind))
    kind = _OF_LANE[lane_kind]
    starts = np.flatnonzero(np.r_[len(kind) > 0, np.any([np.diff(a) != 0 for a in (rank, lane_kind, peer)], axis=0)])
    size = np.where(kind == OpKind.RELOAD, stream.taken_bytes[bucket, 0], stream.size_bytes[bucket])
    return Program(
        layout=layout_of(stream),
        kind=kind.astype(np.uint8),
        mb=stream.round[bucket].astype(np.int32),
        chunk=chunk.astype(np.int16),
        layer=source[bucket].astype(np.int16),
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


def _nth(dest: Ints) -> Longs:
    """Return how many of the same value each has before it."""
    order = np.argsort(dest, kind="stable")
    first = np.r_[0, np.cumsum(np.bincount(dest))]
    nth = np.zeros(len(dest), np.int64)
    nth[order] = np.arange(len(dest)) - first[dest[order]]
    return nth


def _groups(rank: Longs, lane_kind: Longs, peer: Longs, num_devices: int) -> Ints:
    """Number the channels: a send lane and the receive lane at its other end have one number."""
    sends, receives = lane_kind == LaneKind.SEND, lane_kind == LaneKind.RECV
    channel = np.where(sends, rank * num_devices + peer, peer * num_devices + rank)
    group = np.full(len(rank), NEVER, np.int32)
    group[sends | receives] = np.unique(channel[sends | receives], return_inverse=True)[1]
    return group


def step_turns(stream: Stream, dest: Ints, program: Program) -> tuple[Ints, Ints]:
    """Pairs (op, what it waits for): what a device sends and receives in a step waits for both of its step before."""
    steps = np.array(matched_steps(stream.source.tolist(), dest.tolist()), np.int64)
    ops = np.flatnonzero(np.isin(program.lane_kind[program.lane_of], (LaneKind.SEND, LaneKind.RECV)))
    rank, step = program.lane_rank[program.lane_of[ops]], steps[program.cell[ops]]
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
