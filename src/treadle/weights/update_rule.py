"""The dependency rule of weight updates: what each op waits for on its device. Lowering and the verifier use it.

    h2d        the broadcast of what was in its H2D buffer before;
               straight into an IPC buffer: the reload of what was in that one
    broadcast  on its source its h2d; on every device the reload of what was in the IPC buffer before
    reload     its broadcast

"Before" is by the order of broadcasts. An op is named by kind, round and source on its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.ir.ops import UPDATE, OpKind
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.ir.rule import LANES


@dataclass(frozen=True, eq=False)
class OpIndex:
    """The place of each op of an update: `first[kind - H2D, rank, round, source]`, or NEVER; `count` says how often."""

    known: Bools
    first: Ints
    count: Ints

    @classmethod
    def of(cls, program: Program) -> OpIndex:
        """Ops on a lane that is not theirs, or of a round or a source that does not exist, are not known."""
        num_ranks, num_rounds = program.layout.num_ranks, program.layout.num_mb
        lane = program.lane_of
        rank, source, turn = program.lane_rank[lane], program.layer, program.mb
        known = np.isin(program.kind, UPDATE) & (program.lane_kind[lane] == LANES[program.kind])
        known &= (turn >= 0) & (turn < num_rounds) & (source >= 0) & (source < num_ranks)
        known &= (program.kind != OpKind.H2D) | (source == rank)
        known &= (program.chunk >= 0) | ((program.chunk == NEVER) & (program.kind == OpKind.H2D))
        shape = (len(UPDATE), num_ranks, num_rounds, num_ranks)
        ops = np.flatnonzero(known)
        kind = program.kind[ops].astype(np.int64) - OpKind.H2D
        key = np.ravel_multi_index((kind, rank[ops], turn[ops], source[ops].astype(np.int64)), shape)
        first = np.full(int(np.prod(shape)), NEVER, np.int32)
        first[key[::-1]] = ops[::-1]
        return cls(known, first.reshape(shape), np.bincount(key, minlength=len(first)).astype(np.int32).reshape(shape))

    def at(self, kind: OpKind, rank: Ints, turn: Ints, source: Ints) -> Ints:
        """The ops with these labels."""
        found: Ints = self.first[kind - OpKind.H2D, rank, turn, source]
        return found


def inputs(program: Program, labels: OpIndex) -> tuple[Ints, Ints]:
    """Pairs (op, what makes the bytes that it reads); NEVER where nothing does."""
    reload = _of(program, labels, OpKind.RELOAD)
    broadcast = _of(program, labels, OpKind.BROADCAST)
    sent = broadcast[program.layer[broadcast] == _rank(program, broadcast)]
    read = (_mate(program, labels, reload, OpKind.BROADCAST), _mate(program, labels, sent, OpKind.H2D))
    return np.concatenate([reload, sent]), np.concatenate(read)


def reuses(program: Program, labels: OpIndex) -> tuple[Ints, Ints]:
    """Pairs (op, what last reads the bytes that it overwrites), where something does."""
    pairs = [*_ipc_reuses(program, labels), _h2d_reuses(program, labels)]
    op, reader = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return op[reader != NEVER], reader[reader != NEVER]


def _of(program: Program, labels: OpIndex, kind: OpKind) -> Ints:
    return np.flatnonzero(labels.known & (program.kind == kind)).astype(np.int32)


def _rank(program: Program, ops: Ints) -> Ints:
    rank: Ints = program.lane_rank[program.lane_of[ops]]
    return rank


def _mate(program: Program, labels: OpIndex, ops: Ints, kind: OpKind) -> Ints:
    """The op of another kind with the same round and source on the same device."""
    return labels.at(kind, _rank(program, ops), program.mb[ops], program.layer[ops].astype(np.int32))


def _before(program: Program, ops: Ints, buffer: Ints) -> tuple[Ints, Ints]:
    """Of ops in the order of their lane, those with another one before them in their device's buffer, and that one."""
    order = np.lexsort((ops, buffer, _rank(program, ops)))
    rank, buffer, ops = _rank(program, ops)[order], buffer[order], ops[order]
    same = (rank[1:] == rank[:-1]) & (buffer[1:] == buffer[:-1])
    return ops[1:][same], ops[:-1][same]


def _ipc_reuses(program: Program, labels: OpIndex) -> list[tuple[Ints, Ints]]:
    """Broadcasts into an IPC buffer, and copies straight into it."""
    broadcast = _of(program, labels, OpKind.BROADCAST)
    later, earlier = _before(program, broadcast, program.chunk[broadcast].astype(np.int32))
    freed = _mate(program, labels, earlier, OpKind.RELOAD)
    copy = _mate(program, labels, later, OpKind.H2D)
    straight = (copy != NEVER) & (program.chunk[copy] == NEVER)
    return [(later, freed), (copy[straight], freed[straight])]


def _h2d_reuses(program: Program, labels: OpIndex) -> tuple[Ints, Ints]:
    """Copies into an H2D buffer."""
    copy = _of(program, labels, OpKind.H2D)
    copy = copy[program.chunk[copy] != NEVER]
    later, earlier = _before(program, copy, program.chunk[copy].astype(np.int32))
    return later, _mate(program, labels, earlier, OpKind.BROADCAST)


def missing(program: Program, labels: OpIndex) -> tuple[Longs, ...]:
    """(kind - H2D, rank, round, source) of ops that are not there though their bucket is: it has one op on any lane."""
    there = labels.count.any(axis=(0, 1))
    wanted = np.zeros(labels.count.shape, bool)
    wanted[1:] = there
    own = np.arange(labels.count.shape[1])
    wanted[0, own, :, own] = there.T
    return np.nonzero(wanted & (labels.count == 0))
