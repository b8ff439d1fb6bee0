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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.ir.kernel import kernel
from treadle.ir.program import NEVER, Bools, Bytes, Ints, Longs, OpKind, Program, Shorts
from treadle.ir.rule import (
    BACKWARD_PART,
    FOLLOWS,
    FORWARD_PART,
    HEAD_PART,
    LANES,
    NOTHING,
    OFFLOAD,
    ONLOAD,
    REDUCE,
    SEND,
    Rule,
)

UNKNOWN = -2
"""Stands in `key` for an op whose label the layout has no place for."""

# Kernels see plain numbers.
_I, _SEND_F, _SEND_B = int(OpKind.I), int(OpKind.SEND_F), int(OpKind.SEND_B)
_RECV_F, _RECV_B = int(OpKind.RECV_F), int(OpKind.RECV_B)
_OUT, _IN, _REDUCE_GRAD = int(OpKind.OFFLOAD), int(OpKind.ONLOAD), int(OpKind.REDUCE_GRAD)
_EMBED_F, _HEAD_B = int(OpKind.EMBED_F), int(OpKind.HEAD_B)


@dataclass(frozen=True)
class Index:
    """Where each labelled op is: `key[op]` into `first`, which holds the first op of a key, or NEVER."""

    rule: Rule
    key: Longs
    first: Ints
    count: Bytes
    last_gradient: Ints
    num_unknown: int
    num_double: int

    @classmethod
    def of(cls, program: Program) -> Index:
        """One pass over the ops."""
        rule = Rule(program.layout)
        return cls(
            rule,
            *_index(
                program.kind,
                program.mb,
                program.chunk,
                program.layer,
                program.lane_ptr,
                program.lane_rank,
                program.lane_kind,
                program.lane_peer,
                LANES,
                program.layout.num_replicas,
                rule.stage,
                rule.pipe,
                rule.holder,
                rule.depth,
                rule.slot,
                rule.only,
                rule.makes_gradient,
                np.array(rule.shape, np.int64),
            ),
        )

    def needs(self, program: Program) -> tuple[Longs, Ints]:
        """What each op needs, compressed; NEVER where nothing provides it."""
        return _needs(None, None, *self._arrays(program))[:2]

    def unmet(self, program: Program) -> Ints:
        """Pairs (op, what it needs) where neither the op's lane nor its dependencies say plainly that it waits.

        A dependency on something that stands behind the needed op on its lane counts as plain. A chain of waits may
        still lead from the one to the other.
        """
        waits = (program.dep_ptr, program.dep, program.lane_of)
        joined = program.joined if program.joined.any() else None
        return _needs(waits, joined, *self._arrays(program))[2]

    def _arrays(self, program: Program) -> tuple[Any, ...]:
        rule = self.rule
        layout = program.layout
        role, before = rule.tables
        return (
            program.kind,
            program.lane_ptr,
            program.lane_rank,
            self.key,
            self.first,
            self.last_gradient,
            program.chunk,
            program.layer,
            layout.num_replicas,
            rule.stage,
            rule.pipe,
            rule.holder,
            rule.depth,
            rule.slot,
            role,
            before,
            rule.first_reader,
            layout.forward[-1],
            layout.backward[-1],
            np.array(rule.shape, np.int64),
        )


@kernel
def _index(
    kind: Bytes,
    mb: Ints,
    chunk: Shorts,
    layer: Shorts,
    lane_ptr: Longs,
    lane_rank: Ints,
    lane_kind: Bytes,
    lane_peer: Ints,
    belongs: Bytes,
    num_replicas: int,
    stage: Ints,
    pipe: Ints,
    holder: Ints,
    depth: Ints,
    slot: Ints,
    only: Ints,
    makes_gradient: npt.NDArray[np.bool_],
    shape: Longs,
) -> tuple[Longs, Ints, Bytes, Ints, int, int]:
    num_ranks, num_chunks, num_mb, num_layers, num_slots = shape
    key = np.empty(len(kind), np.int64)
    first = np.full(num_ranks * num_chunks * num_mb * num_layers * num_slots, -1, np.int32)
    count = np.zeros(len(first), np.uint8)
    last_gradient = np.full(num_ranks * num_chunks, -1, np.int32)
    num_stages = holder.shape[1]
    num_known, num_double = 0, 0
    for lane in range(len(lane_rank)):
        rank, peer = lane_rank[lane], lane_peer[lane]
        pp = rank // num_replicas
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            k, m, c, at = kind[op], mb[op], chunk[op], layer[op]
            key[op] = UNKNOWN
            if belongs[k] != lane_kind[lane]:
                continue
            if k == _REDUCE_GRAD:  # has no micro-batch and no place in the index
                if m == NEVER and at == 0 and 0 <= c < num_chunks:
                    key[op] = NEVER
                    num_known += 1
                continue
            if slot[k] < 0 or m < 0 or m >= num_mb or c < 0 or c >= num_chunks or at < 0:
                continue
            if k in (_SEND_F, _SEND_B):  # named by its reader, but found here by the chunk that sends it
                if peer < 0 or peer % num_replicas != rank % num_replicas:
                    continue
                maker = stage[peer // num_replicas, c] + (1 if k == _SEND_B else -1)
                if maker < 0 or maker >= num_stages or holder[pipe[c], maker, 0] != pp:
                    continue
                c = holder[pipe[c], maker, 1]
            if at >= depth[stage[pp, c]] or (_SEND_F <= k <= _RECV_B and at > 0):
                continue
            if only[k] >= 0 and (at > 0 or stage[pp, c] != only[k]):
                continue
            place = (((rank * num_chunks + c) * num_mb + m) * num_layers + at) * num_slots + slot[k]
            key[op] = place
            num_known += 1
            if first[place] < 0:
                first[place] = op
            else:
                num_double += 1
            if count[place] < 255:
                count[place] += 1
            if makes_gradient[k] and op > last_gradient[rank * num_chunks + c]:
                last_gradient[rank * num_chunks + c] = op
    return key, first, count, last_gradient, len(kind) - num_known, num_double


@kernel
def _needs(
    waits: tuple[Longs, Ints, Ints] | None,
    joined: Bools | None,
    kind: Bytes,
    lane_ptr: Longs,
    lane_rank: Ints,
    key: Longs,
    first: Ints,
    last_gradient: Ints,
    chunk: Shorts,
    layer: Shorts,
    num_replicas: int,
    stage: Ints,
    pipe: Ints,
    holder: Ints,
    depth: Ints,
    slot: Ints,
    role: Bytes,
    before: Ints,
    first_reader: int,
    last_forward: int,
    last_backward: int,
    shape: Longs,
) -> tuple[Longs, Ints, Ints]:
    num_chunks, num_mb, num_layers, num_slots = shape[1], shape[2], shape[3], shape[4]
    num_stages = holder.shape[1]
    of_chunk = num_mb * num_layers * num_slots
    ptr = np.zeros(len(kind) + 1 if waits is None else 1, np.int64)
    written = np.empty(2 * len(kind) + 16 if waits is None else 1, np.int32)
    unmet = np.empty((1024, 2), np.int32)
    num_unmet, total = 0, 0
    need = np.empty(4, np.int32)
    for lane in range(len(lane_rank)):
        rank = lane_rank[lane]
        pp = rank // num_replicas
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            place, k = key[op], kind[op]
            what = role[k]
            count = 0
            if place < 0:
                what = REDUCE if what == REDUCE and place == NEVER else NOTHING
            base = max(place - slot[k], 0)  # of this (rank, chunk, mb, layer)
            at = layer[op]
            whole = base - at * num_slots  # of layer 0
            c = chunk[op] if what != SEND else (place // of_chunk) % num_chunks
            if what == NOTHING:
                c = 0
            s = stage[pp, c]
            last_layer = depth[s] - 1
            if what == REDUCE:
                need[count] = last_gradient[rank * num_chunks + chunk[op]]
                count += 1
            elif what == FORWARD_PART:
                if before[k] >= 0:
                    need[count] = first[base + slot[before[k]]]
                    count += 1
                elif at > 0:
                    need[count] = first[base - num_slots + slot[last_forward]]
                    count += 1
                elif s > 0:
                    if holder[pipe[c], s - 1, 0] == pp:
                        other = holder[pipe[c], s - 1, 1]
                        far = whole + (other - c) * of_chunk + (depth[s - 1] - 1) * num_slots
                        need[count] = first[far + slot[last_forward]]
                    else:
                        need[count] = first[whole + slot[_RECV_F]]
                    count += 1
                elif slot[_EMBED_F] >= 0:
                    need[count] = first[whole + slot[_EMBED_F]]
                    count += 1
            elif what == BACKWARD_PART:
                if before[k] >= 0:
                    need[count] = first[base + slot[before[k]]]
                    count += 1
                elif at < last_layer:
                    need[count] = first[base + num_slots + slot[last_backward]]
                    count += 1
                else:
                    need[count] = first[whole + last_layer * num_slots + slot[last_forward]]
                    count += 1
                    if s < num_stages - 1:
                        if holder[pipe[c], s + 1, 0] == pp:
                            far = whole + (holder[pipe[c], s + 1, 1] - c) * of_chunk
                            made = first[far + slot[last_backward]]
                            if slot[_I] >= 0:  # at the grain of cells either B or I makes it, whichever is first
                                half = first[far + slot[_I]]
                                if made < 0 or (half >= 0 and half < made):
                                    made = half
                            need[count] = made
                        else:
                            need[count] = first[whole + slot[_RECV_B]]
                        count += 1
                    elif slot[_HEAD_B] >= 0:
                        need[count] = first[whole + slot[_HEAD_B]]
                        count += 1
                if (
                    k == first_reader
                    and slot[_IN] >= 0
                    and (first[base + slot[_OUT]] >= 0 or first[base + slot[_IN]] >= 0)
                ):
                    need[count] = first[base + slot[_IN]]
                    count += 1
            elif what == FOLLOWS:
                need[count] = first[base + slot[before[k]]]
                count += 1
            elif what == HEAD_PART:
                need[count] = first[whole + last_layer * num_slots + slot[last_forward]]
                count += 1
            elif what == SEND:
                if k == _SEND_F:
                    need[count] = first[whole + last_layer * num_slots + slot[last_forward]]
                else:
                    made = first[whole + slot[last_backward]]
                    if slot[_I] >= 0:
                        half = first[whole + slot[_I]]
                        if made < 0 or (half >= 0 and half < made):
                            made = half
                    need[count] = made
                count += 1
            elif what == OFFLOAD:
                need[count] = first[base + slot[last_forward]]
                count += 1
            elif what == ONLOAD:
                need[count] = first[base + slot[_OUT]]
                count += 1
            if waits is None:
                for k in range(count):
                    written[total] = need[k]
                    total += 1
                ptr[op + 1] = total
            else:
                dep_ptr, dep, lane_of = waits
                for n in range(count):
                    wanted = need[n]
                    lead = op  # the first of the ops that start with this one
                    if joined is not None:
                        while lead > lane_ptr[lane] and joined[lead]:
                            lead -= 1
                    met = wanted >= lane_ptr[lane] and wanted < lead
                    if not met and wanted >= 0:
                        for d in range(dep_ptr[op], dep_ptr[op + 1]):
                            met = met or dep[d] == wanted
                        if not met:
                            for d in range(dep_ptr[op], dep_ptr[op + 1]):
                                met = met or (dep[d] > wanted and lane_of[dep[d]] == lane_of[wanted])
                    if met:
                        continue
                    if num_unmet == len(unmet):
                        larger = np.empty((2 * num_unmet, 2), np.int32)
                        larger[:num_unmet] = unmet
                        unmet = larger
                    unmet[num_unmet, 0] = op
                    unmet[num_unmet, 1] = wanted
                    num_unmet += 1
    return ptr, written[:total], unmet[:num_unmet]
