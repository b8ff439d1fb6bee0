"""Memory of ranks over an execution: saved activations, from the forward that makes them on.

Each part of a layer saves something at its forward's start. The bytes are freed at the end of the weight half (a
fraction at the end of the backward already), or of the backward where the two are not split. An offload frees a layer's
bytes at its end, an onload takes them at its start. At equal times freeing comes first.

At the grain of cells a forward saves what the layers of its stage save, where they are known, so stages may differ.
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
    """The most bytes (or what `Layout.saved_unit` says) that each rank holds, and when it first does."""

    size: Longs
    time: Longs


class Changes(NamedTuple):
    """Bytes (or what `Layout.saved_unit` says) that ops take at their start and give back at their end.

    `taken[row, kind]` and `given[row, kind]`, where `row[pp, chunk]` is the row of a rank's chunk.
    """

    row: Ints
    taken: Longs
    given: Longs

    def rows_of(self, program: Program) -> Ints:
        """Return the row of each op; 0 for a chunk that no rank has."""
        pp = program.lane_rank[program.lane_of] // program.layout.num_replicas
        known = (program.chunk >= 0) & (program.chunk < self.row.shape[1])
        rows: Ints = np.where(known, self.row[pp, np.where(known, program.chunk, 0)], 0).astype(np.int32)
        return rows


def per_unit(layout: Layout) -> int:
    """How much of `saved` makes one of its unit: the two parts of a layer count one each."""
    return 2 if layout.saved_unit == "layers" and layout.by_layer else 1


def in_unit(layout: Layout, size: int) -> float:
    """What ops have saved, in the layout's `saved_unit`; an int where it is whole."""
    whole, rest = divmod(size, per_unit(layout))
    return whole if rest == 0 else size / per_unit(layout)


def changes(layout: Layout) -> Changes:
    """By kind of op and, where stages differ, by stage: what is taken at its start and given back at its end."""
    stages = np.array(layout.placement.stages, np.int32)
    saved = _saved_by_stage(layout)
    different = list(dict.fromkeys(tuple(of_stage.items()) for of_stage in saved))
    number = np.array([different.index(tuple(of_stage.items())) for of_stage in saved], np.int32)
    by_kind = [_by_kind(layout, dict(of_stage)) for of_stage in different]
    taken, given = (np.array(side, np.int64) for side in zip(*by_kind, strict=True))
    return Changes(number[stages], taken, given)


def _saved_by_stage(layout: Layout) -> list[dict[OpKind, int]]:
    """What forwards save; one dict for each stage."""
    if layout.by_layer or layout.model_layers == 0:
        return [dict(layout.saved)] * len(layout.layers)
    inside = [dict(layout.saved) for _ in layout.layers]
    for stage, layers in enumerate(layout.layers):
        inside[stage][OpKind.F] = layout.saved.get(OpKind.F, 0) * layers
    for there, stage, kind in ((layout.embedding, 0, OpKind.EMBED_F), (layout.head, -1, OpKind.HEAD_F)):
        if not there:  # no op of its own, so the stage's F has it
            inside[stage][OpKind.F] += layout.saved.get(kind, 0)
    return inside


def _by_kind(layout: Layout, saved: dict[OpKind, int]) -> tuple[Longs, Longs]:
    taken, given = np.zeros(len(OpKind), np.int64), np.zeros(len(OpKind), np.int64)
    for forward, size in saved.items():
        backward, weight = _PARTS[forward]
        taken[forward] = size
        kept = round(size * layout.kept) if weight in layout.weights else 0
        given[backward] += size - kept
        if weight is not None and weight in layout.weights:
            given[weight] += kept
        if forward is OpKind.F:
            given[OpKind.B] = size
    of_layer = sum(size for kind, size in saved.items() if kind in layout.forward)
    taken[OpKind.ONLOAD] = given[OpKind.OFFLOAD] = of_layer
    return taken, given


def peaks(program: Program, times: Times) -> Peaks:
    """The most each rank holds at once."""
    row, taken, given = changes(program.layout)
    order = np.argsort(program.lane_rank, kind="stable").astype(np.int32)
    rank_ptr = np.searchsorted(program.lane_rank[order], np.arange(program.num_ranks + 1))
    if len(taken) == 1:
        what, amounts = program.kind, (taken[0], given[0])
    else:  # kinds of ops numbered anew, each with its row
        what = (Changes(row, taken, given).rows_of(program) * len(OpKind) + program.kind).astype(np.int32)
        amounts = (taken.reshape(-1), given.reshape(-1))
    return Peaks(*_peaks(what, program.lane_ptr, order, rank_ptr, times.start, times.end, *amounts))


@kernel
def _peaks(
    kind: Bytes | Ints,
    lane_ptr: Longs,
    order: Ints,
    rank_ptr: Longs,
    start: Longs,
    end: Longs,
    taken: Longs,
    given: Longs,
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
