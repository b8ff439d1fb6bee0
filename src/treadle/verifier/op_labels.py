"""Checks that every op of a Program is there, once, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from treadle.ir.index import UNKNOWN, Index
from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import BUCKET_OPS, LaneKind, OpKind
from treadle.ir.program import NEVER, Bytes, Ints, Lane, Op, Program
from treadle.ir.rule import Tables
from treadle.verifier.finding import MOST, Finding

_NOWHERE = Lane(NEVER, LaneKind.COMPUTE, NEVER)

# Kernels see plain numbers.
_B = int(OpKind.B)
_I, _W = int(OpKind.I), int(OpKind.W)
_OUT, _IN = int(OpKind.OFFLOAD), int(OpKind.ONLOAD)
_SEND_F, _SEND_B = int(OpKind.SEND_F), int(OpKind.SEND_B)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)


def check_labels(program: Program, index: Index) -> Iterator[Finding]:
    """T101, T102, T105 of a program."""
    if index.num_unknown:
        for op in np.flatnonzero(index.key == UNKNOWN)[:MOST]:
            yield _unknown(program.op(int(op)))
    if index.num_double:
        places = np.flatnonzero(index.count > 1)[:MOST]
        ops = np.flatnonzero(np.isin(index.key, places))
        last = dict(zip(index.key[ops].tolist(), ops.tolist(), strict=True))
        for place in places.tolist():
            again = program.op(last[place])
            yield Finding.at("T102", again, f"{again} runs more than once")
    for rank, chunk, mb, layer, kind in _list_missing(program, index):
        op = Op(NEVER, OpKind(int(kind)), _NOWHERE, int(mb), int(chunk), int(layer), NEVER)
        what = f"send of what {op.label} makes" if op.kind.is_send else op.label
        yield Finding("T101", int(rank), None, f"{f'receive of {what}' if op.kind.is_recv else what} is missing")
    yield from _check_doubled_halves(program, index)
    yield from _check_reductions(program, index)
    yield from _check_step(program, index)


def _list_missing(program: Program, index: Index) -> Ints:
    """(rank, chunk, mb, layer, kind) of each op that is not there, up to MOST."""
    rule = index.rule
    return _missing(index.count, np.array(rule.kinds, np.int32), program.layout.by_layer, rule.tables, MOST)


def _unknown(op: Op) -> Finding:
    if op.kind.lane is not op.lane.kind:
        return Finding.at("T105", op, f"{op} stands on a lane for {op.lane.name}, not on one for {_lane_name(op)}")
    return Finding.at("T105", op, f"{op} has no place in this program's layout")


def _lane_name(op: Op) -> str:
    return op.kind.lane.name.lower()


def _check_doubled_halves(program: Program, index: Index) -> Iterator[Finding]:
    """T102 at the grain of cells: I or W beside a B, which includes both."""
    if program.layout.by_layer:
        return
    count = index.count.reshape(-1, len(index.rule.kinds))
    slot = index.rule.slot
    for kind in (OpKind.I, OpKind.W):
        both = np.flatnonzero((count[:, slot[OpKind.B]] > 0) & (count[:, slot[kind]] > 0))
        for row in both[:MOST]:
            op = program.op(int(index.first[row * count.shape[1] + slot[kind]]))
            yield Finding.at("T102", op, f"{op} stands beside B, which has done it")


def _check_reductions(program: Program, index: Index) -> Iterator[Finding]:
    """What is done to a chunk, or to a bucket, is done to every one of every rank once, if there is any."""
    layout = program.layout
    bucket = index.rule.bucket
    stages = np.repeat(np.array(layout.placement.stages, np.int32), layout.num_replicas, axis=0)
    there = bucket[stages] >= 0  # [rank, chunk, bucket]
    for kind in BUCKET_OPS if layout.buckets else (OpKind.REDUCE_GRAD,):
        ops = np.flatnonzero((program.kind == kind) & (index.key == NEVER))
        if not len(ops):
            continue
        places = program.lane_rank[program.lane_of[ops]], program.chunk[ops], program.layer[ops]
        key = np.ravel_multi_index(places, there.shape)
        count = np.bincount(key, minlength=there.size).reshape(there.shape)
        for rank, chunk, number in np.argwhere((count == 0) & there)[:MOST]:
            of = f" b{number}" if layout.buckets else ""
            yield Finding("T101", int(rank), None, f"{kind.name.lower()} .{chunk}{of} is missing")
        for where in np.flatnonzero(count > 1)[:MOST]:
            op = program.op(int(ops[np.flatnonzero(key == where)[-1]]))
            yield Finding.at("T102", op, f"{op} runs more than once")


def _check_step(program: Program, index: Index) -> Iterator[Finding]:
    """REDUCE_TIED of each tie that a rank has a stage of, and what ends the step, once on each rank; with backwards."""
    layout = program.layout
    if not (layout.tied or layout.step_end) or not _has_backwards(program, index):
        return
    stages = np.repeat(np.array(layout.placement.stages, np.int32), layout.num_replicas, axis=0)
    wanted = [(OpKind.REDUCE_TIED, tie, np.isin(stages, held).any(axis=1)) for tie, held in enumerate(layout.tied)]
    wanted += [(kind, 0, np.ones(layout.num_ranks, bool)) for kind in layout.step_end]
    for kind, layer, ranks in wanted:
        ops = np.flatnonzero((program.kind == kind) & (program.layer == layer) & (index.key == NEVER))
        rank = program.lane_rank[program.lane_of[ops]]
        count = np.bincount(rank, minlength=layout.num_ranks)
        name = f"reduce_tied of tie {layer}" if kind is OpKind.REDUCE_TIED else kind.name.lower()
        for where in np.flatnonzero((count == 0) & ranks)[:MOST]:
            yield Finding("T101", int(where), None, f"{name} is missing")
        for where in np.flatnonzero(count > 1)[:MOST]:
            op = program.op(int(ops[np.flatnonzero(rank == where)[-1]]))
            yield Finding.at("T102", op, f"{op} runs more than once")


def _has_backwards(program: Program, index: Index) -> bool:
    """True if there is an op of a backward chain, where the layout knows it."""
    kinds = {kind for _, backward in index.rule.chains for kind, _ in backward}
    halves = set() if program.layout.by_layer else {OpKind.I}
    return bool((np.isin(program.kind, list(kinds | halves)) & (index.key >= 0)).any())


class _LayerPlace(NamedTuple):
    """A layer of a micro-batch of a chunk; does its stage receive from the stage before, and from the one after."""

    base: int  # its first place in the index
    before: bool
    after: bool


@kernel
def _missing(count: Bytes, kinds: Ints, by_layer: bool, tables: Tables, most: int) -> Ints:
    """(rank, chunk, mb, layer, kind) of what is not there, up to `most`."""
    found = np.zeros((most, 5), np.int32)
    filled = 0
    for rank in range(tables.num_ranks):
        for chunk in range(tables.num_chunks):
            at, before, after = _neighbours(tables, rank // tables.num_replicas, chunk)
            has = tables.has[tables.row[at]]
            for mb in range(tables.num_mb):
                for layer in range(tables.num_layers):
                    row = ((rank * tables.num_chunks + chunk) * tables.num_mb + mb) * tables.num_layers + layer
                    spot = _LayerPlace(row * tables.num_slots, before, after)
                    for slot in range(tables.num_slots):
                        kind = kinds[slot]
                        if filled < most and has[kind, layer] and _is_missing(count, by_layer, tables, spot, kind):
                            found[filled, 0], found[filled, 1], found[filled, 2] = rank, chunk, mb
                            found[filled, 3], found[filled, 4] = layer, kind
                            filled += 1
    return found[:filled]


@inlined
def _neighbours(tables: Tables, pp: int, chunk: int) -> tuple[int, bool, bool]:
    """The stage of a chunk, and whether the stages before and after it are on other ranks."""
    holder, pipe, stage = tables.holder, tables.pipe[chunk], tables.stage[pp, chunk]
    before = stage > 0 and holder[pipe, stage - 1, 0] != pp
    after = stage < holder.shape[1] - 1 and holder[pipe, stage + 1, 0] != pp
    return stage, before, after


@inlined
def _is_missing(count: Bytes, by_layer: bool, tables: Tables, spot: _LayerPlace, kind: int) -> bool:
    """True if there should be an op of this kind, which its layer has, and there is none."""
    base, places = spot.base, tables.slot
    if count[base + places[kind]] > 0:
        return False
    if not by_layer and _B <= kind <= _W:  # either B, or I and W
        whole, split = count[base + places[_B]], count[base + places[_I]] + count[base + places[_W]]
        return bool(whole == 0 and (kind == _B) == (split == 0))
    if kind in (_SEND_F, _RECV_B):
        return spot.after
    if kind in (_SEND_B, _RECV_F):
        return spot.before
    if kind in (_OUT, _IN):  # both, or neither
        return bool(count[base + places[_OUT]] + count[base + places[_IN]] > 0)
    return True
