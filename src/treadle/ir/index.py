"""An index of a Program's ops by label: rank, chunk, micro-batch, layer and kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from treadle.ir.columns import LaneTable, OpLabels
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Bytes, Ints, Longs, Program
from treadle.ir.rule import FORWARD_PART, GATHER, LANES, REDUCE, STEP, TIED, Rule, Tables

UNKNOWN = -2
"""Stands in `Index.key` for an op whose label the layout has no place for."""

# Kernels see plain numbers.
_SEND_F, _SEND_B = int(OpKind.SEND_F), int(OpKind.SEND_B)


class Bounds(NamedTuple):
    """The ops that begin and end a step, of each lane, so that nothing depends on the order in which lanes are stored.

    `lane[ptr[r]]` to `lane[ptr[r + 1]]`, excluding the last, are the lanes of rank r; `compute[r]` to `compute[r + 1]`
    the numbers of its compute lanes, `number[lane]` such a number.
    `last_gradient[compute lane, chunk, bucket]` is the last op of a chunk that adds to a weight gradient of a block of
    the bucket or after it, `first_reader[compute lane, chunk, bucket]` the first forward op of such a block,
    `gather[rank, chunk, bucket]` the first GATHER_PARAMS of the bucket; or NEVER. Without buckets a chunk has one.
    `last_reduction[lane]` is the last reduction, `end[rank, turn]` the first of each op that ends a step; or NEVER.
    """

    ptr: Longs
    lane: Ints
    compute: Longs
    number: Ints
    last_gradient: Ints
    first_reader: Ints
    gather: Ints
    last_reduction: Ints
    end: Ints

    @classmethod
    def before(cls, lanes: LaneTable, tables: Tables) -> Bounds:
        """Return the bounds of a step of which no op is known."""
        ranks = np.arange(tables.num_ranks + 1)
        order = np.argsort(lanes.rank, kind="stable").astype(np.int32)
        computes = order[lanes.kind[order] == LaneKind.COMPUTE]
        number = np.full(len(lanes.rank), NEVER, np.int32)
        number[computes] = np.arange(len(computes))
        of_chunk = tables.num_chunks, tables.bucket.shape[1]
        sizes = (
            (len(computes), *of_chunk),
            (len(computes), *of_chunk),
            (tables.num_ranks, *of_chunk),
            (len(lanes.rank),),
            (tables.num_ranks, 1 + int(tables.turn.max())),
        )
        none = (np.full(size, NEVER, np.int32) for size in sizes)
        ptr, compute = (np.searchsorted(lanes.rank[of], ranks).astype(np.int64) for of in (order, computes))
        return cls(ptr, order, compute, number, *none)


@dataclass(frozen=True)
class Index:
    """The place of each op by its label.

    `key[op]` is the op's place in the index, UNKNOWN without one, NEVER for a reduction or an op that ends the step,
    which have no micro-batch.
    `first[place]` is the first op of a place, or NEVER.
    """

    rule: Rule
    key: Longs
    first: Ints
    bounds: Bounds
    num_unknown: int
    num_double: int

    @cached_property
    def count(self) -> Bytes:
        """`[place]` -> how many ops there are, up to 255."""
        if not self.num_double:
            return (self.first >= 0).astype(np.uint8)
        counted = np.bincount(self.key[self.key >= 0], minlength=len(self.first))
        return np.minimum(counted, 255).astype(np.uint8)

    @classmethod
    def of(cls, program: Program) -> Index:
        """Make the index in one pass over the ops."""
        rule = Rule(program.layout)
        labels, lanes, tables = OpLabels.of(program), LaneTable.of(program), rule.tables
        bounds = Bounds.before(lanes, tables)
        key, first, num_unknown, num_double = _index(labels, lanes, LANES, tables, bounds)
        return cls(rule, key, first, bounds, num_unknown, num_double)


@kernel
def _index(
    labels: OpLabels, lanes: LaneTable, belongs: Bytes, tables: Tables, bounds: Bounds
) -> tuple[Longs, Ints, int, int]:
    """Fill the index and the bounds."""
    kind, chunk, layer = labels.kind, labels.chunk, labels.layer
    num_places = tables.num_ranks * tables.num_chunks * tables.num_mb * tables.num_layers * tables.num_slots
    key = np.empty(len(kind), np.int64)
    first = np.full(num_places, -1, np.int32)
    num_unknown, num_double = 0, 0
    for lane in range(len(lanes.rank)):
        rank, peer, lane_kind = lanes.rank[lane], lanes.peer[lane], lanes.kind[lane]
        pp = rank // tables.num_replicas
        for op in range(lanes.ptr[lane], lanes.ptr[lane + 1]):
            place = _place(labels, tables, op, rank, pp, peer) if belongs[kind[op]] == lane_kind else UNKNOWN
            key[op] = place
            if place < 0:
                num_unknown += place == UNKNOWN
                role, turn = tables.role[kind[op]], tables.turn[kind[op]]
                if place == UNKNOWN:
                    continue
                if role == GATHER:
                    if bounds.gather[rank, chunk[op], layer[op]] < 0:
                        bounds.gather[rank, chunk[op], layer[op]] = op
                elif role in (REDUCE, TIED):
                    bounds.last_reduction[lane] = op
                elif bounds.end[rank, turn] < 0:
                    bounds.end[rank, turn] = op
                continue
            if first[place] < 0:
                first[place] = op
            else:
                num_double += 1
            if tables.makes_gradient[kind[op]] or tables.role[kind[op]] == FORWARD_PART:
                _note_bucket(bounds, labels, tables, op, bounds.number[lane], pp)
    return key, first, num_unknown, num_double


@inlined
def _note_bucket(bounds: Bounds, labels: OpLabels, tables: Tables, op: int, lane: int, pp: int) -> None:
    """Keep the last op that adds to the gradients of a bucket, and the first that reads its parameters."""
    kind, chunk = labels.kind[op], labels.chunk[op]
    stage = tables.stage[pp, chunk]
    block = tables.block[tables.row[stage], kind, labels.layer[op]]
    for number in range(tables.bucket.shape[1]):
        if not 0 <= tables.bucket[stage, number] <= block:
            continue
        if tables.makes_gradient[kind]:
            bounds.last_gradient[lane, chunk, number] = op
        elif bounds.first_reader[lane, chunk, number] < 0:
            bounds.first_reader[lane, chunk, number] = op


@inlined
def _place(labels: OpLabels, tables: Tables, op: int, rank: int, pp: int, peer: int) -> int:
    """Return the op's place in the index, NEVER for a reduction or an op that ends the step, or UNKNOWN."""
    kind, mb, chunk, layer = labels.kind[op], labels.mb[op], int(labels.chunk[op]), int(labels.layer[op])
    slot, num_replicas = tables.slot[kind], tables.num_replicas
    if chunk < 0 or chunk >= tables.num_chunks or layer < 0:
        return UNKNOWN
    if REDUCE <= tables.role[kind] <= STEP:
        return NEVER if mb == NEVER and _ends_step(tables, kind, pp, chunk, layer) else UNKNOWN
    if slot < 0 or mb < 0 or mb >= tables.num_mb or layer >= tables.num_layers:
        return UNKNOWN
    if kind in (_SEND_F, _SEND_B):
        if not 0 <= peer < tables.num_ranks or peer % num_replicas != rank % num_replicas:
            return UNKNOWN
        chunk = _sending_chunk(tables, pp, peer // num_replicas, chunk, kind)
        if chunk < 0:
            return UNKNOWN
    if not tables.has[tables.row[tables.stage[pp, chunk]], kind, layer]:
        return UNKNOWN
    row = ((rank * tables.num_chunks + chunk) * tables.num_mb + mb) * tables.num_layers + layer
    return int(row * tables.num_slots + slot)


@inlined
def _ends_step(tables: Tables, kind: int, pp: int, chunk: int, layer: int) -> bool:
    """True if a rank has such a reduction, or such an op at the end of its step."""
    role = tables.role[kind]
    if role in (REDUCE, GATHER):
        return bool(layer < tables.bucket.shape[1] and tables.bucket[tables.stage[pp, chunk], layer] >= 0)
    if role == TIED:
        if layer >= len(tables.tied) or not tables.tied[layer, tables.stage[pp, chunk]]:
            return False
        lowest = True
        for lower in range(chunk):
            lowest = lowest and not tables.tied[layer, tables.stage[pp, lower]]
        return lowest
    return bool(chunk == 0 and layer == 0)


@inlined
def _sending_chunk(tables: Tables, pp: int, peer: int, chunk: int, kind: int) -> int:
    """Return the chunk of `pp` that makes what `chunk` of `peer` reads, or -1. A message is named by its reader."""
    holder, pipe = tables.holder, tables.pipe[chunk]
    maker = tables.stage[peer, chunk] + (1 if kind == _SEND_B else -1)
    if maker < 0 or maker >= holder.shape[1] or holder[pipe, maker, 0] != pp:
        return -1
    return int(holder[pipe, maker, 1])
