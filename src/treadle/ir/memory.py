"""Memory of ranks over an execution: saved activations, from the forward that makes them on.

Each part of a layer saves something at its forward's start. The bytes are freed at the end of the weight half (a
fraction at the end of the backward already), or of the backward where the two are not split. An offload frees a layer's
bytes at its end, an onload takes them at its start. At equal times freeing comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.ir.execute import Times
from treadle.ir.kernel import kernel
from treadle.ir.program import Bytes, Ints, Layout, Longs, OpKind, Program

_PARTS: dict[OpKind, tuple[OpKind, OpKind | None]] = {
    OpKind.F: (OpKind.I, OpKind.W),
    OpKind.ATTN_F: (OpKind.ATTN_B, OpKind.ATTN_W),
    OpKind.MLP_F: (OpKind.MLP_B, OpKind.MLP_W),
    OpKind.EMBED_F: (OpKind.EMBED_B, None),
    OpKind.HEAD_F: (OpKind.HEAD_B, OpKind.HEAD_W),
}
"""The backward and the weight half of what a forward part saves."""


class Peaks(NamedTuple):
    """The most bytes that each rank holds, and when it first does."""

    size: Longs
    time: Longs


def changes(layout: Layout) -> tuple[Longs, Longs]:
    """By kind of op: bytes taken at its start, bytes given back at its end."""
    taken, given = np.zeros(len(OpKind), np.int64), np.zeros(len(OpKind), np.int64)
    for forward, size in layout.saved.items():
        backward, weight = _PARTS[forward]
        taken[forward] = size
        kept = round(size * layout.kept) if weight in layout.weights else 0
        given[backward] += size - kept
        if weight is not None and weight in layout.weights:
            given[weight] += kept
        if forward is OpKind.F:
            given[OpKind.B] = size
    of_layer = sum(size for kind, size in layout.saved.items() if kind in layout.forward)
    taken[OpKind.ONLOAD] = given[OpKind.OFFLOAD] = of_layer
    return taken, given


def peaks(program: Program, times: Times) -> Peaks:
    """The most each rank holds at once."""
    taken, given = changes(program.layout)
    order = np.argsort(program.lane_rank, kind="stable").astype(np.int32)
    rank_ptr = np.searchsorted(program.lane_rank[order], np.arange(program.num_ranks + 1))
    return Peaks(*_peaks(program.kind, program.lane_ptr, order, rank_ptr, times.start, times.end, taken, given))


@kernel
def _peaks(
    kind: Bytes, lane_ptr: Longs, order: Ints, rank_ptr: Longs, start: Longs, end: Longs, taken: Longs, given: Longs
) -> tuple[Longs, Longs]:
    """Merges each rank's lanes, whose ops are in order of time, two events an op."""
    num_ranks = len(rank_ptr) - 1
    size, time = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    most = 0
    for rank in range(num_ranks):
        most = max(most, rank_ptr[rank + 1] - rank_ptr[rank])
    taking, giving, stop = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    for rank in range(num_ranks):
        count = 0
        for k in range(rank_ptr[rank], rank_ptr[rank + 1]):
            lane = order[k]
            uses = False
            for op in range(lane_ptr[lane], min(lane_ptr[lane + 1], lane_ptr[lane] + 64)):
                uses = uses or taken[kind[op]] > 0 or given[kind[op]] > 0
            if not uses:
                continue
            taking[count] = giving[count] = lane_ptr[lane]
            stop[count] = lane_ptr[lane + 1]
            count += 1
        held = np.int64(0)
        while True:
            best, at, gives = -1, np.int64(0), False
            for k in range(count):
                while taking[k] < stop[k] and taken[kind[taking[k]]] == 0:
                    taking[k] += 1
                while giving[k] < stop[k] and given[kind[giving[k]]] == 0:
                    giving[k] += 1
                if giving[k] < stop[k] and (best < 0 or end[giving[k]] < at or (end[giving[k]] == at and not gives)):
                    best, at, gives = k, end[giving[k]], True
                if taking[k] < stop[k] and (best < 0 or start[taking[k]] < at):
                    best, at, gives = k, start[taking[k]], False
            if best < 0:
                break
            if gives:
                held -= given[kind[giving[best]]]
                giving[best] += 1
            else:
                held += taken[kind[taking[best]]]
                taking[best] += 1
                if held > size[rank]:
                    size[rank] = held
                    time[rank] = at
    return size, time
