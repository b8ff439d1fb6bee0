"""A stream as a Program: three lanes a device, all broadcasts one communicator.

A stream with routes has lanes to and from each peer in place of the broadcasts; a device's k-th step waits for
its step before.

    device 0  h2d        h2d 0.0 ................... h2d 1.0
              broadcast          0.0 0.1 0.2 0.3             1.0 1.1 ...
              reload                 0.0 0.1 0.2 0.3             1.0 ...

With one H2D buffer the copies of a round start when the last broadcast of the round before has ended, as published for
Kimi K2's checkpoint engine: copy and broadcast then never share a device's links. With two they start as soon as a
buffer is free.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Longs, Program
from treadle.weights.bucket_stream import Stream
from treadle.weights.targeted_lowering import layout_of, step_turns, targeted_ops
from treadle.weights.update_rule import OpIndex, inputs, reuses

MOST_DEVICES = int(np.iinfo(np.int16).max)
_LANES = (LaneKind.H2D, LaneKind.BROADCAST, LaneKind.RELOAD)


def lower_update(stream: Stream) -> Program:
    """The Program of an update: every op waits for what the rule says, copies besides for their turn."""
    if stream.num_devices > MOST_DEVICES:
        raise ValueError(f"an update has at most {MOST_DEVICES} devices, got {stream.num_devices}")
    if stream.hops is None:
        program = _without_waits(stream)
        turns, when = _turns(stream, program), np.arange(program.num_ops)
    else:
        program, when = targeted_ops(stream, stream.hops)
        turns = step_turns(program, when)
    labels = OpIndex.of(program)
    waits = (inputs(program, labels), reuses(program, labels, when), turns)
    op, wanted = (np.concatenate([pair[side] for pair in waits]) for side in (0, 1))
    order = np.argsort(op, kind="stable")
    dep_ptr = np.zeros(program.num_ops + 1, np.int64)
    np.cumsum(np.bincount(op, minlength=program.num_ops), out=dep_ptr[1:])
    return replace(program, dep_ptr=dep_ptr, dep=wanted[order].astype(np.int32))


def _without_waits(stream: Stream) -> Program:
    num, devices = stream.num_buckets, np.arange(stream.num_devices)
    mine = np.argsort(stream.source, kind="stable")
    per_device = np.bincount(stream.source, minlength=stream.num_devices)
    first = np.r_[0, np.cumsum(per_device)]
    bucket = np.concatenate([part for d in devices for part in (mine[first[d] : first[d + 1]], *[np.arange(num)] * 2)])
    counts = np.stack([per_device, np.full(len(devices), num), np.full(len(devices), num)], 1)
    lane = np.repeat(np.arange(counts.size), counts.reshape(-1))
    kind = np.array(_LANES)[lane % 3]
    h2d = kind == LaneKind.H2D
    nth = np.zeros(num, np.int64)
    nth[mine] = np.arange(num) - first[stream.source[mine]]
    copied_to = nth % stream.num_h2d if stream.num_h2d else np.full(num, NEVER)
    size = np.where(kind == LaneKind.RELOAD, _taken(stream, bucket, lane // 3), stream.size_bytes[bucket])
    group = np.tile(np.array([NEVER, 0, NEVER], np.int32), stream.num_devices)
    return Program(
        layout=layout_of(stream),
        kind=(kind - LaneKind.H2D + OpKind.H2D).astype(np.uint8),
        mb=stream.round[bucket].astype(np.int32),
        chunk=np.where(h2d, copied_to[bucket], bucket % stream.num_ipc).astype(np.int16),
        layer=stream.source[bucket].astype(np.int16),
        cell=bucket.astype(np.int32),
        launch=np.full(len(bucket), NEVER, np.int32),
        size_bytes=size.astype(np.int64),
        joined=np.zeros(len(bucket), bool),
        lane_ptr=np.r_[0, np.cumsum(counts.reshape(-1))].astype(np.int64),
        lane_rank=np.repeat(devices, 3).astype(np.int32),
        lane_kind=np.tile(np.array(_LANES, np.uint8), stream.num_devices),
        lane_peer=np.full(counts.size, NEVER, np.int32),
        lane_group=group,
        dep_ptr=np.zeros(len(bucket) + 1, np.int64),
        dep=np.zeros(0, np.int32),
    )


def _taken(stream: Stream, bucket: Longs, device: Longs) -> Longs:
    taken: Longs = stream.taken_bytes[bucket, device if stream.taken_bytes.shape[1] > 1 else 0]
    return taken


def _turns(stream: Stream, program: Program) -> tuple[Ints, Ints]:
    """With one H2D buffer: a copy waits for the last broadcast of the round before, on its own device."""
    copy = np.flatnonzero((program.kind == OpKind.H2D) & (program.mb > 0)).astype(np.int32)
    if stream.num_h2d != 1 or not len(copy):
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    last = np.searchsorted(stream.round, program.mb[copy]) - 1
    broadcasts = program.lane_ptr[program.lane_of[copy] + 1]
    return copy, (broadcasts + last).astype(np.int32)
