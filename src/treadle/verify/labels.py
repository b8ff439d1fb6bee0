"""Is every op of a Program there, once, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treadle.ir.kernel import kernel
from treadle.ir.needs import UNKNOWN, Index
from treadle.ir.program import EMBEDDING, HEAD, LANE_OF, NEVER, Bytes, Ints, Lane, LaneKind, Longs, Op, OpKind, Program
from treadle.verify.finding import MOST, Finding

_NOWHERE = Lane(NEVER, LaneKind.COMPUTE, NEVER)

# Kernels see plain numbers.
_B, _I, _W, _OUT, _IN = int(OpKind.B), int(OpKind.I), int(OpKind.W), int(OpKind.OFFLOAD), int(OpKind.ONLOAD)
_SEND_F, _SEND_B = int(OpKind.SEND_F), int(OpKind.SEND_B)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)


def check_labels(program: Program, index: Index) -> Iterator[Finding]:
    """T101, T102, T105 of a program."""
    if index.num_unknown:
        for op in np.flatnonzero(index.key == UNKNOWN)[:MOST]:
            yield _unknown(program.op(int(op)))
    rule = index.rule
    if index.num_double:
        for place in np.flatnonzero(index.count > 1)[:MOST]:
            again = program.op(int(np.flatnonzero(index.key == place)[-1]))
            yield Finding.at("T102", again, f"{again} runs more than once")
    layout = program.layout
    shape = np.array(rule.shape, np.int64)
    codes = np.zeros(len(OpKind), np.int32)
    codes[list(layout.forward)] = codes[list(layout.backward)] = codes[list(layout.weights)] = 1
    codes[[*EMBEDDING, *HEAD[:2]]] = 1  # those that the layout lacks are not among the rule's kinds
    missing = _missing(
        index.count,
        shape,
        layout.num_replicas,
        rule.stage,
        rule.pipe,
        rule.holder,
        rule.depth,
        np.array(rule.kinds, np.int32),
        rule.slot,
        rule.only,
        codes,
        layout.by_layer,
        MOST,
    )
    for rank, chunk, mb, layer, kind in missing:
        op = Op(NEVER, OpKind(int(kind)), _NOWHERE, int(mb), int(chunk), int(layer), NEVER)
        what = f"send of what {op.label} makes" if op.kind.is_send else op.label
        yield Finding("T101", int(rank), None, f"{f'receive of {what}' if op.kind.is_recv else what} is missing")
    yield from _check_doubled_halves(program, index)
    yield from _check_reductions(program, index)


def _unknown(op: Op) -> Finding:
    if LANE_OF[op.kind] is not op.lane.kind:
        return Finding.at("T105", op, f"{op} stands on a lane for {op.lane.name}, not on one for {_lane_name(op)}")
    return Finding.at("T105", op, f"{op} has no place in this program's layout")


def _lane_name(op: Op) -> str:
    return LANE_OF[op.kind].name.lower()


def _check_doubled_halves(program: Program, index: Index) -> Iterator[Finding]:
    """At the grain of cells B has done what I and W do."""
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
    """REDUCE_GRAD of every chunk of every rank once, if there is any."""
    lanes = np.flatnonzero(program.lane_kind == LaneKind.DP)
    spans = [np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1]) for lane in lanes]
    ops = np.concatenate([np.empty(0, np.int64), *spans])
    ops = ops[index.key[ops] == NEVER]
    if not len(ops):
        return
    num_chunks, num_ranks = program.layout.placement.vpp, program.layout.num_ranks
    key = program.lane_rank[program.lane_of[ops]] * num_chunks + program.chunk[ops]
    count = np.bincount(key, minlength=num_ranks * num_chunks)
    for where in np.flatnonzero(count == 0)[:MOST]:
        rank, chunk = divmod(int(where), num_chunks)
        yield Finding("T101", rank, None, f"reduce_grad .{chunk} is missing")
    for where in np.flatnonzero(count > 1)[:MOST]:
        op = program.op(int(ops[np.flatnonzero(key == where)[-1]]))
        yield Finding.at("T102", op, f"{op} runs more than once")


@kernel
def _missing(
    count: Bytes,
    shape: Longs,
    num_replicas: int,
    stage: Ints,
    pipe: Ints,
    holder: Ints,
    depth: Ints,
    kinds: Ints,
    slot: Ints,
    only: Ints,
    always: Ints,
    by_layer: bool,
    most: int,
) -> Ints:
    """(rank, chunk, mb, layer, kind) of what is not there, up to `most`."""
    num_ranks, num_chunks, num_mb, num_layers, num_slots = shape
    num_stages = holder.shape[1]
    found = np.empty((most, 5), np.int32)
    filled = 0
    for rank in range(num_ranks):
        pp = rank // num_replicas
        for chunk in range(num_chunks):
            s = stage[pp, chunk]
            before = s > 0 and holder[pipe[chunk], s - 1, 0] != pp
            after = s < num_stages - 1 and holder[pipe[chunk], s + 1, 0] != pp
            for mb in range(num_mb):
                for layer in range(depth[s]):
                    base = (((rank * num_chunks + chunk) * num_mb + mb) * num_layers + layer) * num_slots
                    for k in range(num_slots):
                        if count[base + k] > 0:
                            continue
                        kind = kinds[k]
                        wanted = always[kind] == 1 and (only[kind] < 0 or (only[kind] == s and layer == 0))
                        if not by_layer and _B <= kind <= _W:
                            whole, split = count[base + slot[_B]], count[base + slot[_I]] + count[base + slot[_W]]
                            wanted = whole == 0 and (kind == _B) == (split == 0)
                        elif kind in (_SEND_F, _RECV_B):
                            wanted = after and layer == 0
                        elif kind in (_SEND_B, _RECV_F):
                            wanted = before and layer == 0
                        elif kind in (_OUT, _IN):
                            wanted = count[base + slot[_OUT]] + count[base + slot[_IN]] > 0
                        if wanted and filled < most:
                            found[filled, 0] = rank
                            found[filled, 1] = chunk
                            found[filled, 2] = mb
                            found[filled, 3] = layer
                            found[filled, 4] = kind
                            filled += 1
    return found[:filled]
