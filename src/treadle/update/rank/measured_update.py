"""An update's measured times, as a Trace of the planned Program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.ir.ops import BUCKET_MOVES, UPDATE, OpKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Trace
from treadle.update.rank.bucket_loop import BucketTimes
from treadle.weights.bucket_stream import stream_of
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan


def noted(times: BucketTimes, num_buckets: int) -> Longs:
    """One rank's times as an array `[kind, bucket, start or end]`, -1 for ops it did not run."""
    both = np.full((len(UPDATE), num_buckets, 2), -1, np.int64)
    for kind, by_bucket in enumerate((times.h2d, times.broadcast, times.reload, times.send, times.recv)):
        for bucket, (start, end) in by_bucket.items():
            both[kind, bucket] = start, end
    return both


def trace_of(plan: UpdatePlan, ranks: Sequence[Longs], about: str) -> Trace:
    """Return the Trace of all ranks' times, which are on one clock.

    A broadcast starts when the last rank has come to it, and ends on each rank by itself; so do a send and its receive.
    A device whose worker takes nothing of a bucket has a reload of length 0 after its broadcast.
    """
    program = lower_update(stream_of(plan))
    device, bucket = program.lane_rank[program.lane_of], program.cell
    kind = np.searchsorted(UPDATE, program.kind)
    times = np.stack(list(ranks))[device, kind, bucket]
    start, end = times[:, 0].copy(), times[:, 1].copy()
    _begin_together(program, start, end)
    idle = (program.kind == OpKind.RELOAD) & (end < 0)
    broadcast = program.kind == OpKind.BROADCAST
    ended = np.zeros((len(ranks), len(plan.buckets)), np.int64)
    ended[device[broadcast], bucket[broadcast]] = end[broadcast]
    start[idle] = end[idle] = ended[device[idle], bucket[idle]]
    _in_turn(program, start, end, idle)
    first = int(start.min(initial=np.iinfo(np.int64).max)) if len(start) else 0
    return Trace(program, start - first, end - first, about=about, measured=True)


def _begin_together(program: Program, start: Longs, end: Longs) -> None:
    moves = np.flatnonzero(np.isin(program.kind, BUCKET_MOVES))
    lane, sends = program.lane_of[moves], program.kind[moves] == OpKind.SEND_BUCKET
    receiver = np.where(sends, program.lane_peer[lane], program.lane_rank[lane])
    receiver[program.kind[moves] == OpKind.BROADCAST] = 0
    hop = program.cell[moves].astype(np.int64) * program.num_ranks + receiver
    _, meeting = np.unique(hop, return_inverse=True)
    launched = np.zeros(len(moves), np.int64)
    np.maximum.at(launched, meeting, start[moves])
    start[moves] = np.minimum(launched[meeting], end[moves])


def _in_turn(program: Program, start: Longs, end: Longs, idle: Longs) -> None:
    """Put a reload of length 0 after the reload before it on its lane."""
    for op in np.flatnonzero(idle):
        if op > program.lane_ptr[program.lane_of[op]]:
            start[op] = end[op] = max(end[op], end[op - 1])
