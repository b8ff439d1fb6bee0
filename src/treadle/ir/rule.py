"""A Layout as tables: what the kernels that apply the dependency rule read.

A stage's forward is a chain of ops, block by block, and its backward the chain of the blocks in reverse. Stages with
the same row of blocks share a row of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treadle.ir.blocks import LAYERS
from treadle.ir.ops import (
    BLOCK_BACKWARD,
    BLOCK_FORWARD,
    COPIES,
    MESSAGES,
    RECOMPUTE,
    SENDS,
    WEIGHT_OF,
    LaneKind,
    OpKind,
    OpPhase,
    OpRole,
    column,
    where,
)
from treadle.ir.program import NEVER, Bools, Bytes, Ints, Layout

LANES: Bytes = column(lambda kind: kind.lane, np.uint8)
"""`[kind]` -> the kind of lane it belongs on."""

FORWARD_PART, BACKWARD_PART, FOLLOWS, AGAIN, SEND, ONLOAD, REDUCE, GATHER, TIED, STEP, NOTHING = range(11)
"""The roles of kinds: the numbers in `Tables.role`. FOLLOWS and AGAIN need the op in `before`; AGAIN an onload too.
From REDUCE to STEP they belong to no micro-batch."""


class Label(NamedTuple):
    """An op of a stage: its kind, and the layer (or the MTP block) that it belongs to."""

    kind: OpKind
    layer: int


def forward_chain(row: str, layout: Layout) -> tuple[Label, ...]:
    """The forward of a stage with this row of blocks."""
    return tuple(_chain(row, layout.forward, BLOCK_FORWARD, layout))


def backward_chain(row: str, layout: Layout) -> tuple[Label, ...]:
    """The backward of a stage with this row of blocks."""
    return tuple(reversed(list(_chain(row, layout.backward[::-1], BLOCK_BACKWARD, layout))))


def _chain(row: str, parts: tuple[OpKind, ...], blocks: Mapping[str, OpKind], layout: Layout) -> Iterator[Label]:
    """The ops of one phase of a stage; `blocks` are those of blocks that are no layers."""
    if not layout.by_layer:
        yield Label(parts[0], 0)
        return
    count = dict.fromkeys((LAYERS, *blocks), 0)
    for block in row:
        alike = LAYERS if block in LAYERS else block
        kinds = [part for part in parts if block in part.blocks] if block in LAYERS else [blocks[block]]
        yield from (Label(kind, count[alike]) for kind in kinds)
        count[alike] += 1


class Tables(NamedTuple):
    """A Rule as kernels take it: its arrays, and the sizes of the index over rank, chunk, micro-batch, layer, kind.

    The properties of `Rule` say what each array holds.
    """

    num_replicas: int
    num_ranks: int
    num_chunks: int
    num_mb: int
    num_layers: int
    num_slots: int
    stage: Ints
    pipe: Ints
    holder: Ints
    row: Ints
    slot: Ints
    has: Bools
    before: Ints
    opens: Bools
    forward_end: Ints
    backward_end: Ints
    again: Ints
    makes_gradient: Bools
    role: Bytes
    tied: Bools
    turn: Ints
    block: Ints
    bucket: Ints


@dataclass(frozen=True)
class Rule:
    """A layout as the tables that the kernels read."""

    layout: Layout

    @cached_property
    def stage(self) -> Ints:
        """`[pp, chunk]` -> stage."""
        return np.array(self.layout.placement.stages, np.int32)

    @cached_property
    def pipe(self) -> Ints:
        """`[chunk]` -> pipe."""
        return np.array(self.layout.placement.pipes, np.int32)

    @cached_property
    def holder(self) -> Ints:
        """`[pipe, stage]` -> (pp, chunk)."""
        placement = self.layout.placement
        table = [
            [placement.holder(stage, pipe) for stage in range(placement.num_stages)]
            for pipe in range(placement.num_pipes)
        ]
        return np.array(table, np.int32)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The different rows of blocks."""
        return tuple(dict.fromkeys(self.layout.blocks))

    @cached_property
    def row(self) -> Ints:
        """`[stage]` -> the number of its row of blocks."""
        return np.array([self.rows.index(row) for row in self.layout.blocks], np.int32)

    @cached_property
    def slot(self) -> Ints:
        """`[kind]` -> its place in the index, or -1 for kinds that the layout does not have."""
        slot = np.full(len(OpKind), NEVER, np.int32)
        for place, kind in enumerate(self.kinds):
            slot[kind] = place
        return slot

    @cached_property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kinds of ops that this layout's labels name, each with a place in the index."""
        layout, letters = self.layout, set("".join(self.rows))
        if not layout.by_layer:
            return (*layout.forward, *layout.backward, OpKind.I, *self.weights, *MESSAGES)
        ends = [letter for letter in BLOCK_FORWARD if letter in letters]
        others = [kind for letter in ends for kind in (BLOCK_FORWARD[letter], BLOCK_BACKWARD[letter])]
        of_layers = (*layout.forward, *layout.backward, *self.weights)
        return (*of_layers, *MESSAGES, *COPIES, *others, *layout.recomputed)

    @cached_property
    def weights(self) -> tuple[OpKind, ...]:
        """The wgrads, of a cell W; those of blocks that no stage has are none."""
        if not self.layout.by_layer:
            return (OpKind.W,)
        letters = {*LAYERS, *"".join(self.rows)}
        return tuple(kind for kind in self.layout.weights if letters & set(kind.blocks))

    @cached_property
    def chains(self) -> tuple[tuple[tuple[Label, ...], tuple[Label, ...]], ...]:
        """The forward and the backward of each row of blocks."""
        return tuple((forward_chain(row, self.layout), backward_chain(row, self.layout)) for row in self.rows)

    @cached_property
    def tables(self) -> Tables:
        """All of it for kernels."""
        layout = self.layout
        ends = np.array([[self._offset(chain[-1]) for chain in chains] for chains in self.chains], np.int32)
        return Tables(
            layout.num_replicas,
            *self.shape,
            stage=self.stage,
            pipe=self.pipe,
            holder=self.holder,
            row=self.row,
            slot=self.slot,
            has=self.has,
            before=self.before,
            opens=self.opens,
            forward_end=np.ascontiguousarray(ends[:, 0]),
            backward_end=np.ascontiguousarray(ends[:, 1]),
            again=self._again,
            makes_gradient=self.makes_gradient,
            role=self._role,
            tied=self.tied,
            turn=self.turn,
            block=self.block,
            bucket=self.bucket,
        )

    def _offset(self, label: Label) -> int:
        """Return the place of an op in the index, from the first place of its micro-batch on."""
        return int(label.layer * len(self.kinds) + self.slot[label.kind])

    @cached_property
    def has(self) -> Bools:
        """`[row, kind, layer]`: is there such an op in a stage with this row of blocks."""
        has = np.zeros(self._table_shape, np.bool_)
        follow = {backward: weight for weight, backward in WEIGHT_OF.items() if weight in self.weights}
        again = {of: kind for kind, of in RECOMPUTE.items() if kind in self.layout.recomputed}
        for number, (row, (forward, backward)) in enumerate(zip(self.rows, self.chains, strict=True)):
            for kind, layer in (*forward, *backward):
                for present in (kind, follow.get(kind), again.get(kind)):
                    if present is not None:
                        has[number, present, layer] = True
            has[number, list(MESSAGES), 0] = True
            if self.layout.by_layer:
                layers = sum(row.count(letter) for letter in LAYERS)
                has[number][list(COPIES), :layers] = True
            else:
                has[number, [OpKind.I, OpKind.W], 0] = True
        return has

    @cached_property
    def before(self) -> Ints:
        """`[row, kind, layer]` -> the offset of the op that one follows in its chain, or -1 for the first."""
        before = np.full(self._table_shape, NEVER, np.int32)
        for number, chains in enumerate(self.chains):
            for chain in chains:
                for one, other in pairwise(chain):
                    before[number, other.kind, other.layer] = self._offset(one)
            for weight in self.weights:
                for layer in range(self.layout.max_layers):
                    before[number, weight, layer] = self._offset(Label(WEIGHT_OF[weight], layer))
            for again in self.layout.recomputed if self.layout.by_layer else ():
                for layer in range(self.layout.max_layers):
                    before[number, again, layer] = self._offset(Label(RECOMPUTE[again], layer))
            for kind, layer in chains[0] if self.layout.by_layer else ():
                if kind in self.layout.forward:  # the last of its layer is what stays
                    before[number, OpKind.OFFLOAD, layer] = self._offset(Label(kind, layer))
        return before

    @cached_property
    def opens(self) -> Bools:
        """`[row, kind, layer]`: is it the first backward part of a layer, which waits for an onload."""
        opens = np.zeros(self._table_shape, np.bool_)
        for number, (_, backward) in enumerate(self.chains):
            seen: set[int] = set()
            for kind, layer in backward:
                if kind in self.layout.backward and self.layout.by_layer and layer not in seen:
                    seen.add(layer)
                    opens[number, kind, layer] = True
        return opens

    @property
    def _again(self) -> Ints:
        """`[kind]` -> the slot of the recompute that a backward part needs, or -1."""
        again = np.full(len(OpKind), NEVER, np.int32)
        for kind in self.layout.recomputed if self.layout.by_layer else ():
            again[kind.in_phase(OpPhase.B)] = self.slot[kind]
        return again

    @property
    def _role(self) -> Bytes:
        role = np.full(len(OpKind), NOTHING, np.uint8)
        for forward, backward in self.chains:
            role[[kind for kind, _ in forward]] = FORWARD_PART
            role[[kind for kind, _ in backward]] = BACKWARD_PART
        if not self.layout.by_layer:
            role[OpKind.I] = BACKWARD_PART
        role[list(self.weights)] = FOLLOWS
        role[list(self.layout.recomputed)] = AGAIN
        role[list(SENDS)] = SEND
        role[OpKind.OFFLOAD], role[OpKind.ONLOAD] = FOLLOWS, ONLOAD
        role[OpKind.REDUCE_SCATTER if self.layout.buckets else OpKind.REDUCE_GRAD] = REDUCE
        role[OpKind.REDUCE_TIED] = TIED
        role[list(self.layout.step_end)] = STEP
        if self.layout.buckets:
            role[OpKind.GATHER_PARAMS] = GATHER
        return role

    @property
    def block(self) -> Ints:
        """`[row, kind, layer]` -> the block whose parameters such an op reads, or whose gradients it adds to, or -1."""
        block = np.full(self._table_shape, NEVER, np.int32)
        for number, row in enumerate(self.rows):
            count = dict.fromkeys((LAYERS, *BLOCK_FORWARD), 0)
            for place, letter in enumerate(row if self.layout.by_layer else ""):
                alike = LAYERS if letter in LAYERS else letter
                block[number, [kind for kind in OpKind if letter in kind.blocks], count[alike]] = place
                count[alike] += 1
            if not self.layout.by_layer:
                block[number, list(where(role=OpRole.ACTION)), 0] = 0
        block[:, [kind for kind in OpKind if kind.lane is not LaneKind.COMPUTE]] = NEVER
        return block

    @property
    def bucket(self) -> Ints:
        """`[stage, bucket]` -> its first block, or -1; without buckets a stage's one begins at its first block."""
        buckets = self.layout.buckets or ((0,),) * self.layout.placement.num_stages
        table = np.full((len(buckets), max(map(len, buckets))), NEVER, np.int32)
        for stage, firsts in enumerate(buckets):
            table[stage, : len(firsts)] = firsts
        return table

    @property
    def turn(self) -> Ints:
        """`[kind]` -> its place among the ops that end the step, or -1."""
        turn = np.full(len(OpKind), NEVER, np.int32)
        turn[list(self.layout.step_end)] = np.arange(len(self.layout.step_end))
        return turn

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sizes of the index: rank, chunk, micro-batch, layer, kind."""
        layout = self.layout
        return (layout.num_ranks, layout.placement.vpp, layout.num_mb, layout.max_layers, len(self.kinds))

    @property
    def _table_shape(self) -> tuple[int, int, int]:
        return len(self.rows), len(OpKind), self.layout.max_layers

    @property
    def makes_gradient(self) -> Bools:
        """`[kind]`: does its end add to a weight gradient."""
        made = np.zeros(len(OpKind), bool)
        made[list(self.weights)] = True
        split = {WEIGHT_OF[kind] for kind in self.weights}
        may = [kind for kind in where(phase=OpPhase.B) if kind.role in (OpRole.ACTION, OpRole.COMPUTE)]
        made[[kind for kind in may if kind in self.kinds and kind not in split]] = True
        return made

    @property
    def tied(self) -> Bools:
        """`[tie, stage]`: does the stage share the parameter."""
        tied = np.zeros((len(self.layout.tied), self.layout.placement.num_stages), bool)
        for number, stages in enumerate(self.layout.tied):
            tied[number, list(stages)] = True
        return tied
