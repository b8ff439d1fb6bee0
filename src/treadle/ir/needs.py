"""The dependency rule over a Program's columns: which ops each op needs, by its label alone.

    op of a forward chain     the op before it; the first of the chain what comes from the stage before
    op of a backward chain    the op before it; the first of the chain its own forward, and what comes from the stage
                              after
    wgrad                     its backward op
    recomputed part           its forward part; the backward part needs it
    first reader of what was saved    its onload, where it was offloaded
    send                      the last op of the chain that makes it
    offload, onload           the last forward part of its layer; its offload
    reduce_grad, reduce_tied  all ops of the chunk, or of the chunks that share a parameter, that make a weight gradient
    reduce_scatter            all ops that make a weight gradient of its bucket's blocks, or of those after them
    forwards of a bucket's blocks, or of those after them   besides its gather_params, where there is one
    end of the step           all gradients and their reductions; then one after the other

Of "all ops" the last of each lane are needed, as lanes run in order; of the forwards the first of each lane need.

Lowering writes these down as dependencies; the verifier asks whether they are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.ir.columns import LaneTable, OpLabels, Waits
from treadle.ir.index import Bounds, Index
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import OpKind
from treadle.ir.program import NEVER, Bools, Bytes, Ints, Longs, Program, Shorts
from treadle.ir.rule import (
    AGAIN,
    BACKWARD_PART,
    FOLLOWS,
    FORWARD_PART,
    NOTHING,
    ONLOAD,
    REDUCE,
    SEND,
    STEP,
    TIED,
    Tables,
)

# Kernels see plain numbers.
_I, _SEND_F = int(OpKind.I), int(OpKind.SEND_F)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)
_OUT, _IN = int(OpKind.OFFLOAD), int(OpKind.ONLOAD)

_MOST_NEEDS = 4
"""An op of a micro-batch needs no more ops than this: its forward, a gradient, an onload, what was recomputed."""


_NO_OPS: Ints = np.empty(0, np.int32)


def waits_of(program: Program, index: Index, op: Ints = _NO_OPS, waits_for: Ints = _NO_OPS) -> tuple[Longs, Ints]:
    """List what each op has to wait for, compressed: its needs, but those that its lane's order meets; then more.

    A need that nothing provides is NEVER. `op[i]`, in ascending order, waits for `waits_for[i]` besides.
    """
    return _list_waits(op, waits_for, *_arguments(program, index))


def unmet_needs(program: Program, index: Index) -> Ints:
    """List pairs (op, what it needs) where neither the op's lane nor its dependencies make it wait plainly.

    A dependency on something that stands after the needed op on its lane counts as plain. A chain of waits may
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
    bounds: Bounds


def _arguments(program: Program, index: Index) -> tuple[LaneTable, _Known, Tables]:
    labels = OpLabels.of(program)
    known = _Known(labels.kind, labels.chunk, labels.layer, index.key, index.first, index.bounds)
    return LaneTable.of(program), known, index.rule.tables


@inlined
def _room(known: _Known, tables: Tables) -> int:
    """Return how many ops one can need at most: of each chunk on each lane of its rank one."""
    most = 1
    for rank in range(tables.num_ranks):
        most = max(most, known.bounds.ptr[rank + 1] - known.bounds.ptr[rank])
    return int(max(_MOST_NEEDS + tables.bucket.shape[1], most * (tables.num_chunks + 1)))


@kernel
def _list_waits(more_op: Ints, more: Ints, lanes: LaneTable, known: _Known, tables: Tables) -> tuple[Longs, Ints]:
    num_ops, num_more = len(known.kind), len(more)
    ptr = np.zeros(num_ops + 1, np.int64)
    waits = np.empty(num_ops + num_more + 16, np.int32)
    need = np.empty(_room(known, tables), np.int32)
    total = at = 0
    for lane in range(len(lanes.rank)):
        rank, begin = lanes.rank[lane], lanes.ptr[lane]
        for op in range(begin, lanes.ptr[lane + 1]):
            count = _needs(known, tables, op, rank, need)
            if total + count + num_more > len(waits):
                waits = np.concatenate((waits, waits))
            for n in range(count):
                if not begin <= need[n] <= op:
                    waits[total] = need[n]
                    total += 1
            while at < num_more and more_op[at] == op:
                waits[total] = more[at]
                total += 1
                at += 1
            ptr[op + 1] = total
    return ptr, waits[:total]


@kernel
def _list_unmet(
    joined: Bools | None, waits: Waits, lane_of: Ints, lanes: LaneTable, known: _Known, tables: Tables
) -> Ints:
    unmet = np.empty((1024, 2), np.int32)
    need = np.empty(_room(known, tables), np.int32)
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
    """Return the first of the ops that start with `op`, on a lane that begins with op `begin`."""
    if joined is not None:
        while op > begin and joined[op]:
            op -= 1
    return op


@inlined
def _waits_for(waits: Waits, lane_of: Ints, op: int, wanted: int) -> bool:
    """True if `op` depends on `wanted`, or on an op after `wanted` on its lane."""
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
    row: int  # of its stage's blocks
    layer: int
    own: int  # the first place of its own layer
    bottom: int  # of layer 0


@inlined
def _spot(known: _Known, tables: Tables, op: int, rank: int) -> _Spot:
    place, layer, chunk = known.key[op], known.layer[op], int(known.chunk[op])
    if tables.role[known.kind[op]] == SEND:  # its label is the reader's, its place is of the chunk that makes it
        chunk = (place // (tables.num_mb * tables.num_layers * tables.num_slots)) % tables.num_chunks
    pp = rank // tables.num_replicas
    stage = tables.stage[pp, chunk]
    own = place - tables.slot[known.kind[op]]
    return _Spot(pp, chunk, stage, tables.row[stage], layer, own, own - layer * tables.num_slots)


@inlined
def _needs(known: _Known, tables: Tables, op: int, rank: int, need: Ints) -> int:
    """Write what `op` needs into `need`, and return how many ops these are."""
    kind, place = known.kind[op], known.key[op]
    first, slot, role = known.first, tables.slot, tables.role[kind]
    if place == NEVER:
        return _step_needs(known, tables, op, rank, need)
    if place < 0 or role == NOTHING:
        return 0
    spot = _spot(known, tables, op, rank)
    if role == FORWARD_PART:
        return _and_gathers(known, tables, op, rank, need, _forward_needs(first, tables, spot, kind, need))
    if role == BACKWARD_PART:
        return _backward_needs(first, tables, spot, kind, need)
    count = 1
    if role in (FOLLOWS, AGAIN):
        need[0] = first[spot.bottom + tables.before[spot.row, kind, spot.layer]]
        if role == AGAIN:
            count = _and_onload(first, tables, spot, need, count)
    elif role == SEND and kind == _SEND_F:
        need[0] = first[spot.bottom + tables.forward_end[spot.row]]
    elif role == SEND:
        need[0] = _gradient_maker(first, tables, spot.row, spot.bottom)
    elif role == ONLOAD:
        need[0] = first[spot.own + slot[_OUT]]
    return count


@inlined
def _step_needs(known: _Known, tables: Tables, op: int, rank: int, need: Ints) -> int:
    """Write the needs of reductions and of what ends a step, which belong to no micro-batch."""
    role, chunk = tables.role[known.kind[op]], known.chunk[op]
    if role == REDUCE:
        return _gradients(known.bounds, rank, chunk, known.layer[op], need, 0)
    count = 0
    if role == TIED:
        for held in range(tables.num_chunks):
            stage = tables.stage[rank // tables.num_replicas, held]
            if tables.tied[known.layer[op], stage]:
                count = _gradients(known.bounds, rank, held, _last_bucket(tables, stage), need, count)
        return count
    if role != STEP:
        return 0
    turn = tables.turn[known.kind[op]]
    if turn > 0:
        need[0] = known.bounds.end[rank, turn - 1]
        return 1
    return _all_gradients(known.bounds, tables, rank, need)


@inlined
def _last_bucket(tables: Tables, stage: int) -> int:
    """Return the bucket of a stage that begins at block 0."""
    last = 0
    for number in range(tables.bucket.shape[1]):
        if tables.bucket[stage, number] >= 0:
            last = number
    return last


@inlined
def _gradients(bounds: Bounds, rank: int, chunk: int, bucket: int, need: Ints, count: int) -> int:
    """Add the last ops that make a weight gradient of a bucket or of those after it, or NEVER if there are none."""
    before = count
    for lane in range(bounds.compute[rank], bounds.compute[rank + 1]):
        if bounds.last_gradient[lane, chunk, bucket] >= 0:
            need[count] = bounds.last_gradient[lane, chunk, bucket]
            count += 1
    if count == before:
        need[count] = NEVER
        count += 1
    return count


@inlined
def _all_gradients(bounds: Bounds, tables: Tables, rank: int, need: Ints) -> int:
    """Write the last ops of a rank that make a weight gradient, and its last reductions, as far as there are any."""
    count = 0
    for lane in range(bounds.compute[rank], bounds.compute[rank + 1]):
        gradient = -1
        for chunk in range(tables.num_chunks):
            last = _last_bucket(tables, tables.stage[rank // tables.num_replicas, chunk])
            gradient = max(gradient, bounds.last_gradient[lane, chunk, last])
        if gradient >= 0:
            need[count] = gradient
            count += 1
    for place in range(bounds.ptr[rank], bounds.ptr[rank + 1]):
        reduction = bounds.last_reduction[bounds.lane[place]]
        if reduction >= 0:
            need[count] = reduction
            count += 1
    return count


@inlined
def _and_gathers(known: _Known, tables: Tables, op: int, rank: int, need: Ints, count: int) -> int:
    """Add the gathers of the buckets whose parameters this op reads first on its lane; return how many are needed."""
    chunk, bounds = known.chunk[op], known.bounds
    for number in range(tables.bucket.shape[1]):
        gather = bounds.gather[rank, chunk, number]
        for lane in range(bounds.compute[rank], bounds.compute[rank + 1]):
            if gather >= 0 and bounds.first_reader[lane, chunk, number] == op:
                need[count] = gather
                count += 1
    return count


@inlined
def _forward_needs(first: Ints, tables: Tables, spot: _Spot, kind: int, need: Ints) -> int:
    """Write the op before in the chain; of the first op, what it reads from the stage before."""
    holder, pipe = tables.holder, tables.pipe[spot.chunk]
    before = tables.before[spot.row, kind, spot.layer]
    if before >= 0:
        need[0] = first[spot.bottom + before]
    elif spot.stage == 0:
        return 0
    elif holder[pipe, spot.stage - 1, 0] == spot.pp:
        far = _same_mb(tables, spot, holder[pipe, spot.stage - 1, 1])
        need[0] = first[far + tables.forward_end[tables.row[spot.stage - 1]]]
    else:
        need[0] = first[spot.bottom + tables.slot[_RECV_F]]
    return 1


@inlined
def _backward_needs(first: Ints, tables: Tables, spot: _Spot, kind: int, need: Ints) -> int:
    """Write the op before in the chain; of the first op its own forward and its gradient; what is recomputed."""
    before = tables.before[spot.row, kind, spot.layer]
    count = 1
    if before >= 0:
        need[0] = first[spot.bottom + before]
    else:
        need[0] = first[spot.bottom + tables.forward_end[spot.row]]
        if spot.stage < tables.holder.shape[1] - 1:
            need[1] = _gradient_from_stage_after(first, tables, spot)
            count = 2
    if tables.opens[spot.row, kind, spot.layer]:
        count = _and_onload(first, tables, spot, need, count)
    if tables.again[kind] >= 0:
        need[count] = first[spot.own + tables.again[kind]]
        count += 1
    return count


@inlined
def _and_onload(first: Ints, tables: Tables, spot: _Spot, need: Ints, count: int) -> int:
    """Add the onload of the layer, if it was offloaded, and return how many ops are needed then."""
    onload, offload = first[spot.own + tables.slot[_IN]], first[spot.own + tables.slot[_OUT]]
    if onload < 0 and offload < 0:
        return count
    need[count] = onload
    return count + 1


@inlined
def _gradient_from_stage_after(first: Ints, tables: Tables, spot: _Spot) -> int:
    """Return the receive that brings it, or its maker on the same rank."""
    holder, pipe, after = tables.holder, tables.pipe[spot.chunk], spot.stage + 1
    if holder[pipe, after, 0] == spot.pp:
        return _gradient_maker(first, tables, tables.row[after], _same_mb(tables, spot, holder[pipe, after, 1]))
    return int(first[spot.bottom + tables.slot[_RECV_B]])


@inlined
def _same_mb(tables: Tables, spot: _Spot, chunk: int) -> int:
    """Return the place of the same micro-batch in another chunk of the rank, at layer 0."""
    return spot.bottom + (chunk - spot.chunk) * tables.num_mb * tables.num_layers * tables.num_slots


@inlined
def _gradient_maker(first: Ints, tables: Tables, row: int, bottom: int) -> int:
    """Return the op that makes a chunk's input gradient; at the grain of cells B or I, whichever is first."""
    slot = tables.slot
    made = first[bottom + tables.backward_end[row]]
    if slot[_I] >= 0:
        dgrad = first[bottom + slot[_I]]
        if made < 0 or 0 <= dgrad < made:
            made = dgrad
    return int(made)
