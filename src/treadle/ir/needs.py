"""The dependency rule over a Program's columns: which ops each op needs, by its label alone.

    first part of a layer     the last part of the layer before; of the first layer, what comes from the stage before,
                              or the embedding
    any other part            the part before it
    first part of a backward  the last part of the layer after; of the last layer, what comes from the stage after or
                              from the head, and its own forward
    head                      the last part of the last layer; its backward its forward
    backward of the embedding the last part of the backward
    weight half               its backward part
    first reader of what was saved    its onload, where it was offloaded
    send                      the last part of what it sends
    offload, onload           the last forward part of its layer; its offload
    reduce_grad               the last op of the chunk that makes a weight gradient

Lowering writes these down as dependencies; the verifier asks whether they are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.ir.columns import LaneTable, OpLabels, Waits
from treadle.ir.index import Index
from treadle.ir.kernel import inlined, kernel
from treadle.ir.program import NEVER, Bools, Bytes, Ints, Longs, OpKind, Program, Shorts
from treadle.ir.rule import (
    BACKWARD_PART,
    FOLLOWS,
    FORWARD_PART,
    HEAD_PART,
    NOTHING,
    OFFLOAD,
    ONLOAD,
    REDUCE,
    SEND,
    Tables,
)

# Kernels see plain numbers.
_I, _SEND_F = int(OpKind.I), int(OpKind.SEND_F)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)
_OUT, _IN = int(OpKind.OFFLOAD), int(OpKind.ONLOAD)
_EMBED_F, _HEAD_B = int(OpKind.EMBED_F), int(OpKind.HEAD_B)

_MOST_NEEDS = 4
"""An op needs no more ops than this: its forward, a gradient, an onload."""


def needs_of(program: Program, index: Index) -> tuple[Longs, Ints]:
    """List what each op needs, compressed; NEVER where nothing provides it."""
    return _list_needs(*_arguments(program, index))


def unmet_needs(program: Program, index: Index) -> Ints:
    """List pairs (op, what it needs) where neither the op's lane nor its dependencies say plainly that it waits.

    A dependency on something that stands behind the needed op on its lane counts as plain. A chain of waits may
    still lead from the one to the other.
    """
    joined = program.joined if program.joined.any() else None
    return _list_unmet(joined, Waits.of(program), program.lane_of, *_arguments(program, index))


class _Known(NamedTuple):
    """Columns of the ops and of the index that the rule reads."""

    kind: Bytes
    chunk: Shorts
    layer: Shorts
    key: Longs
    first: Ints
    last_gradient: Ints


def _arguments(program: Program, index: Index) -> tuple[LaneTable, _Known, Tables]:
    labels = OpLabels.of(program)
    known = _Known(labels.kind, labels.chunk, labels.layer, index.key, index.first, index.last_gradient)
    return LaneTable.of(program), known, index.rule.tables


@kernel
def _list_needs(lanes: LaneTable, known: _Known, tables: Tables) -> tuple[Longs, Ints]:
    num_ops = len(known.kind)
    ptr = np.zeros(num_ops + 1, np.int64)
    needs = np.empty(2 * num_ops + 16, np.int32)
    need = np.empty(_MOST_NEEDS, np.int32)
    total = 0
    for lane in range(len(lanes.rank)):
        rank = lanes.rank[lane]
        for op in range(lanes.ptr[lane], lanes.ptr[lane + 1]):
            for n in range(_needs(known, tables, op, rank, need)):
                needs[total] = need[n]
                total += 1
            ptr[op + 1] = total
    return ptr, needs[:total]


@kernel
def _list_unmet(
    joined: Bools | None, waits: Waits, lane_of: Ints, lanes: LaneTable, known: _Known, tables: Tables
) -> Ints:
    unmet = np.empty((1024, 2), np.int32)
    need = np.empty(_MOST_NEEDS, np.int32)
    total = 0
    for lane in range(len(lanes.rank)):
        rank, begin = lanes.rank[lane], lanes.ptr[lane]
        for op in range(begin, lanes.ptr[lane + 1]):
            for n in range(_needs(known, tables, op, rank, need)):
                wanted = need[n]
                if begin <= wanted < _first_joined(joined, begin, op) or _waits_for(waits, lane_of, op, wanted):
                    continue
                if total == len(unmet):
                    unmet = np.concatenate((unmet, unmet))
                unmet[total, 0], unmet[total, 1] = op, wanted
                total += 1
    return unmet[:total]


@inlined
def _first_joined(joined: Bools | None, begin: int, op: int) -> int:
    """The first of the ops that start with `op`, on a lane that begins with op `begin`."""
    if joined is not None:
        while op > begin and joined[op]:
            op -= 1
    return op


@inlined
def _waits_for(waits: Waits, lane_of: Ints, op: int, wanted: int) -> bool:
    """True if `op` depends on `wanted`, or on an op behind `wanted` on its lane."""
    if wanted < 0:
        return False
    dep, first, last = waits.dep, waits.ptr[op], waits.ptr[op + 1]
    met = False
    for d in range(first, last):
        met = met or dep[d] == wanted
    if not met:
        for d in range(first, last):
            met = met or (dep[d] > wanted and lane_of[dep[d]] == lane_of[wanted])
    return met


class _Spot(NamedTuple):
    """The stage of an op, and the places of its micro-batch in the index."""

    pp: int
    chunk: int
    stage: int
    layer: int
    own: int  # the first place of its own layer
    bottom: int  # of layer 0
    top: int  # of the stage's last layer


@inlined
def _spot(known: _Known, tables: Tables, op: int, rank: int) -> _Spot:
    place, layer = known.key[op], known.layer[op]
    of_chunk = tables.num_mb * tables.num_layers * tables.num_slots
    pp, chunk = rank // tables.num_replicas, (place // of_chunk) % tables.num_chunks
    stage = tables.stage[pp, chunk]
    own = place - tables.slot[known.kind[op]]
    bottom = own - layer * tables.num_slots
    top = bottom + (tables.depth[stage] - 1) * tables.num_slots
    return _Spot(pp, chunk, stage, layer, own, bottom, top)


@inlined
def _needs(known: _Known, tables: Tables, op: int, rank: int, need: Ints) -> int:
    """Write what `op` needs into `need`, and return how many ops these are."""
    kind, place = known.kind[op], known.key[op]
    first, slot = known.first, tables.slot
    role, before = tables.role[kind], tables.before[kind]
    if place == NEVER and role == REDUCE:
        need[0] = known.last_gradient[rank * tables.num_chunks + known.chunk[op]]
        return 1
    if place < 0 or role == NOTHING:
        return 0
    spot = _spot(known, tables, op, rank)
    if role == FORWARD_PART:
        return _forward_needs(first, tables, spot, before, need)
    if role == BACKWARD_PART:
        return _backward_needs(first, tables, spot, kind, before, need)
    if role == FOLLOWS:
        need[0] = first[spot.own + slot[before]]
    elif role == HEAD_PART or (role == SEND and kind == _SEND_F):
        need[0] = first[spot.top + slot[tables.last_forward]]
    elif role == SEND:
        need[0] = _gradient_maker(first, tables, spot.bottom)
    elif role == OFFLOAD:
        need[0] = first[spot.own + slot[tables.last_forward]]
    elif role == ONLOAD:
        need[0] = first[spot.own + slot[_OUT]]
    return 1


@inlined
def _forward_needs(first: Ints, tables: Tables, spot: _Spot, before: int, need: Ints) -> int:
    """The part before; of the first part, what it reads: the layer before, the stage before, or the embedding."""
    slot, holder, pipe = tables.slot, tables.holder, tables.pipe[spot.chunk]
    last = slot[tables.last_forward]
    if before >= 0:
        need[0] = first[spot.own + slot[before]]
    elif spot.layer > 0:
        need[0] = first[spot.own - tables.num_slots + last]
    elif spot.stage > 0:
        if holder[pipe, spot.stage - 1, 0] == spot.pp:
            far = _same_mb(tables, spot, holder[pipe, spot.stage - 1, 1])
            need[0] = first[far + (tables.depth[spot.stage - 1] - 1) * tables.num_slots + last]
        else:
            need[0] = first[spot.bottom + slot[_RECV_F]]
    elif slot[_EMBED_F] >= 0:
        need[0] = first[spot.bottom + slot[_EMBED_F]]
    else:
        return 0
    return 1


@inlined
def _backward_needs(first: Ints, tables: Tables, spot: _Spot, kind: int, before: int, need: Ints) -> int:
    """The part before; of the first part, the gradient it reads and what its forward saved."""
    slot, own = tables.slot, spot.own
    count = 1
    if before >= 0:
        need[0] = first[own + slot[before]]
    elif own < spot.top:
        need[0] = first[own + tables.num_slots + slot[tables.last_backward]]
    else:
        need[0] = first[own + slot[tables.last_forward]]
        if spot.stage < tables.holder.shape[1] - 1:
            need[1] = _gradient_from_stage_after(first, tables, spot)
            count = 2
        elif slot[_HEAD_B] >= 0:
            need[1] = first[spot.bottom + slot[_HEAD_B]]
            count = 2
    if kind == tables.first_backward and slot[_IN] >= 0:
        onload = first[own + slot[_IN]]
        if onload >= 0 or first[own + slot[_OUT]] >= 0:
            need[count] = onload
            count += 1
    return count


@inlined
def _gradient_from_stage_after(first: Ints, tables: Tables, spot: _Spot) -> int:
    """The receive that brings it, or its maker on the same rank."""
    holder, pipe, after = tables.holder, tables.pipe[spot.chunk], spot.stage + 1
    if holder[pipe, after, 0] == spot.pp:
        return _gradient_maker(first, tables, _same_mb(tables, spot, holder[pipe, after, 1]))
    return int(first[spot.bottom + tables.slot[_RECV_B]])


@inlined
def _same_mb(tables: Tables, spot: _Spot, chunk: int) -> int:
    """The place of the same micro-batch in another chunk of the rank, at layer 0."""
    return spot.bottom + (chunk - spot.chunk) * tables.num_mb * tables.num_layers * tables.num_slots


@inlined
def _gradient_maker(first: Ints, tables: Tables, bottom: int) -> int:
    """The op that makes a chunk's input gradient; at the grain of cells B or I, whichever is first."""
    slot = tables.slot
    made = first[bottom + slot[tables.last_backward]]
    if slot[_I] >= 0:
        half = first[bottom + slot[_I]]
        if made < 0 or 0 <= half < made:
            made = half
    return int(made)
