"""The dependency rule of weight updates: what each op waits for on its device. Lowering and the verifier use it.

    h2d          what last read its H2D buffer: a broadcast, a send, or the reload of a bucket that stays on its device;
                 straight into an IPC buffer: the reload of what was in that one
    broadcast    on its source its h2d; on every device the reload of what was in its IPC buffer before
    send         its h2d; of a bucket that the device sends on, its receive
    receive      the reload of what was in its IPC buffer before, and its send, where it is sent on
    reload       its broadcast or receive; of a bucket that stays on its device, its h2d

"Before" is by the order in which buckets come to a device. An op is named by its kind and its bucket's number, on its
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.ir.ops import BUCKET_COMES, BUCKET_LEAVES, UPDATE, OpKind
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.ir.rule import LANES

_PLACE = np.full(len(OpKind), NEVER, np.int64)
_PLACE[list(UPDATE)] = np.arange(len(UPDATE))


@dataclass(frozen=True, eq=False)
class OpIndex:
    """The place of each op of an update: of those with a key of kind, rank and bucket the first, and how many."""

    known: Bools
    keys: Longs
    first: Ints
    count: Ints
    num_ranks: int
    num_buckets: int

    @classmethod
    def of(cls, program: Program) -> OpIndex:
        """Ops on a lane that is not theirs, or of a round, source or bucket that does not exist, are not known.

        Nor are those whose round or source is not that of most ops of their bucket.
        """
        num_ranks, num_rounds = program.layout.num_ranks, program.layout.num_mb
        lane = program.lane_of
        rank, source, turn = program.lane_rank[lane], program.layer, program.mb
        known = np.isin(program.kind, UPDATE) & (program.lane_kind[lane] == LANES[program.kind])
        known &= (turn >= 0) & (turn < num_rounds) & (source >= 0) & (source < num_ranks) & (program.cell >= 0)
        known &= (program.kind != OpKind.H2D) | (source == rank)
        known &= (program.chunk >= 0) | ((program.chunk == NEVER) & (program.kind == OpKind.H2D))
        known &= ~_stray(program.cell, turn.astype(np.int64) * num_ranks + source, known)
        ops = np.flatnonzero(known)
        num_buckets = int(program.cell.max(initial=-1)) + 1
        key = (_PLACE[program.kind[ops]] * num_ranks + rank[ops]) * num_buckets + program.cell[ops]
        order = np.argsort(key, kind="stable")
        keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
        return cls(known, keys, ops[order][first].astype(np.int32), count.astype(np.int32), num_ranks, num_buckets)

    def at(self, kind: OpKind, rank: Ints, bucket: Ints) -> Ints:
        """The ops with these labels, NEVER where there is none."""
        key = (_PLACE[kind] * self.num_ranks + rank.astype(np.int64)) * self.num_buckets + bucket
        place = np.minimum(np.searchsorted(self.keys, key), max(0, len(self.keys) - 1))
        if not len(self.keys):
            return np.full(len(key), NEVER, np.int32)
        found: Ints = np.where(self.keys[place] == key, self.first[place], NEVER).astype(np.int32)
        return found


def _stray(bucket: Ints, label: Longs, known: Bools) -> Bools:
    """Ops whose label is not that of most ops of their bucket."""
    stray = np.zeros(len(bucket), bool)
    ops = np.flatnonzero(known)
    if not len(ops):
        return stray
    low = np.full(int(bucket[ops].max()) + 1, np.iinfo(np.int64).max)
    high = np.full(len(low), -1, np.int64)
    np.minimum.at(low, bucket[ops], label[ops])
    np.maximum.at(high, bucket[ops], label[ops])
    for number in np.flatnonzero((low < high) & (high >= 0)):
        mine = ops[bucket[ops] == number]
        labels, count = np.unique(label[mine], return_counts=True)
        stray[mine[label[mine] != labels[count.argmax()]]] = True
    return stray


def inputs(program: Program, labels: OpIndex) -> tuple[Ints, Ints]:
    """Pairs (op, what makes the bytes that it reads); NEVER where nothing does."""
    reload = _of(program, labels, OpKind.RELOAD)
    broadcast = _of(program, labels, OpKind.BROADCAST)
    own = broadcast[program.layer[broadcast] == _rank(program, broadcast)]
    sent = np.concatenate([own, _of(program, labels, OpKind.SEND_BUCKET)])
    arrived = _first(
        _mate(program, labels, reload, OpKind.BROADCAST), _mate(program, labels, reload, OpKind.RECV_BUCKET)
    )
    stays = np.isin(program.cell[reload], program.cell[np.isin(program.kind, BUCKET_COMES)], invert=True)
    copied = np.where(stays, _mate(program, labels, reload, OpKind.H2D), NEVER).astype(np.int32)
    packed = _first(_mate(program, labels, sent, OpKind.RECV_BUCKET), _mate(program, labels, sent, OpKind.H2D))
    return np.concatenate([reload, sent]), np.concatenate([_first(arrived, copied), packed])


def reuses(program: Program, labels: OpIndex, when: Longs) -> tuple[Ints, Ints]:
    """Pairs (op, what last reads the bytes that it overwrites), where something does; `when` has the order of ops."""
    pairs = [*_ipc_reuses(program, labels, when), _h2d_reuses(program, labels)]
    op, reader = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return op[reader != NEVER], reader[reader != NEVER]


def _of(program: Program, labels: OpIndex, *kinds: OpKind) -> Ints:
    return np.flatnonzero(labels.known & np.isin(program.kind, kinds)).astype(np.int32)


def _first(one: Ints, other: Ints) -> Ints:
    """The one where there is one, else the other."""
    found: Ints = np.where(one != NEVER, one, other)
    return found


def _rank(program: Program, ops: Ints) -> Ints:
    rank: Ints = program.lane_rank[program.lane_of[ops]]
    return rank


def _mate(program: Program, labels: OpIndex, ops: Ints, kind: OpKind) -> Ints:
    """The op of another kind for the same bucket on the same device."""
    return labels.at(kind, _rank(program, ops), program.cell[ops])


def _before(program: Program, ops: Ints, buffer: Ints, place: Longs | Ints) -> tuple[Ints, Ints]:
    """Of ops in the order of `place`, those with another one before them in their device's buffer, and that one."""
    order = np.lexsort((place, buffer, _rank(program, ops)))
    rank, buffer, ops = _rank(program, ops)[order], buffer[order], ops[order]
    same = (rank[1:] == rank[:-1]) & (buffer[1:] == buffer[:-1])
    return ops[1:][same], ops[:-1][same]


def _ipc_reuses(program: Program, labels: OpIndex, when: Longs) -> list[tuple[Ints, Ints]]:
    """Broadcasts and receives into an IPC buffer, and copies straight into it."""
    pairs = []
    for kind in BUCKET_COMES:
        filled = _of(program, labels, kind)
        later, earlier = _before(program, filled, program.chunk[filled].astype(np.int32), when[filled])
        freed = _mate(program, labels, earlier, OpKind.RELOAD)
        copy = _mate(program, labels, later, OpKind.H2D)
        straight = (copy != NEVER) & (program.chunk[copy] == NEVER)
        pairs += [(later, freed), (copy[straight], freed[straight])]
        pairs.append((later, _mate(program, labels, earlier, OpKind.SEND_BUCKET)))
    return pairs


def _h2d_reuses(program: Program, labels: OpIndex) -> tuple[Ints, Ints]:
    """Copies into an H2D buffer."""
    copy = _of(program, labels, OpKind.H2D)
    copy = copy[program.chunk[copy] != NEVER]
    later, earlier = _before(program, copy, program.chunk[copy].astype(np.int32), copy)
    sent, send = (_mate(program, labels, earlier, kind) for kind in BUCKET_LEAVES)
    return later, _first(_first(sent, send), _mate(program, labels, earlier, OpKind.RELOAD))


def missing(program: Program, labels: OpIndex) -> tuple[list[tuple[OpKind, int, int, int]], Ints]:
    """(kind, rank, round, source) of ops that are not there though their bucket is; and ops on a device without a part.

    A bucket is there if it has one op on any lane. If none of them is a broadcast, it goes along a route: to all
    devices that reload it, receive it, or that it is sent to.
    """
    ops = np.flatnonzero(labels.known)
    buckets, first, place = np.unique(program.cell[ops], return_index=True, return_inverse=True)
    source, turn = program.layer[ops[first]].astype(np.int32), program.mb[ops[first]]
    every = np.arange(labels.num_ranks, dtype=np.int32)
    wide = np.isin(buckets, program.cell[ops[program.kind[ops] == OpKind.BROADCAST]])
    wanted: list[tuple[OpKind, Ints, Longs]] = [(OpKind.H2D, source, np.arange(len(buckets)))]
    whole = np.flatnonzero(wide)
    for kind in (OpKind.BROADCAST, OpKind.RELOAD):
        wanted.append((kind, np.tile(every, len(whole)), np.repeat(whole, len(every))))
    narrow = ~wide[place]
    wanted += _on_routes(program, ops[narrow], place[narrow], source, np.flatnonzero(~wide))
    found, expected = [], [np.zeros(0, np.int32)]
    for kind, rank, bucket in wanted:
        there = labels.at(kind, rank, buckets[bucket])
        expected.append(there)
        found += [
            (kind, int(rank[i]), int(turn[bucket[i]]), int(source[bucket[i]])) for i in np.flatnonzero(there == NEVER)
        ]
    strays = np.setdiff1d(labels.first, np.concatenate(expected))
    return found, strays.astype(np.int32)


def _on_routes(
    program: Program, ops: Longs, bucket: Longs, source: Ints, buckets: Longs
) -> list[tuple[OpKind, Ints, Longs]]:
    """(kind, ranks, buckets) of the ops that buckets on routes must have, by those that they have."""
    ranks, lane, kind = program.num_ranks, program.lane_of[ops], program.kind[ops]
    rank, peer = program.lane_rank[lane], np.clip(program.lane_peer[lane], 0, None)
    takes, comes = kind == OpKind.RELOAD, kind == OpKind.RECV_BUCKET
    leaves = kind == OpKind.SEND_BUCKET
    key = bucket * ranks
    takers = np.concatenate([(key + rank)[takes | comes], (key + peer)[leaves]])
    alone = np.setdiff1d(buckets, takers // ranks)
    taken, taker = np.divmod(np.union1d(takers, alone * ranks + source[alone]), ranks)
    moved = taker != source[taken]
    first = taken[moved] * ranks + source[taken[moved]]
    sent, sender = np.divmod(np.union1d((key + peer)[comes], first), ranks)
    wanted = ((OpKind.RELOAD, taker, taken), (OpKind.RECV_BUCKET, taker[moved], taken[moved]))
    return [(kind, who.astype(np.int32), which) for kind, who, which in (*wanted, (OpKind.SEND_BUCKET, sender, sent))]
