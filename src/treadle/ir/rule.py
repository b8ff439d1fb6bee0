"""A Layout as tables: what the kernels that apply the dependency rule read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from treadle.ir.dependency import WEIGHT_OF
from treadle.ir.program import EMBEDDING, HEAD, LANE_OF, NEVER, Bools, Bytes, Ints, Layout, OpKind

LANES = np.array([LANE_OF[kind] for kind in OpKind], np.uint8)
"""`[kind]` -> the kind of lane it belongs on."""

FORWARD_PART, BACKWARD_PART, FOLLOWS, SEND, OFFLOAD, ONLOAD, REDUCE, HEAD_PART, NOTHING = range(9)
"""The roles of kinds: the numbers in `Tables.role`. FOLLOWS needs the kind in `before`, of its own label."""


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
    depth: Ints
    slot: Ints
    only: Ints
    makes_gradient: Bools
    role: Bytes
    before: Ints
    last_forward: int
    first_backward: int
    last_backward: int


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
    def depth(self) -> Ints:
        """`[stage]` -> layers, 1 at the grain of cells."""
        layers = self.layout.layers
        return np.array(layers if self.layout.by_layer else [1] * len(layers), np.int32)

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
        layout = self.layout
        messages = (OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B)
        halves = () if layout.by_layer else (OpKind.I,)
        copies = (OpKind.OFFLOAD, OpKind.ONLOAD) if layout.by_layer else ()
        ends = (*(EMBEDDING if layout.embedding else ()), *(HEAD[:2] if layout.head else ()))
        return (*layout.forward, *layout.backward, *halves, *self.weights, *messages, *copies, *ends)

    @cached_property
    def weights(self) -> tuple[OpKind, ...]:
        """The weight halves; without a head HEAD_W is none."""
        return tuple(kind for kind in self.layout.weights if self.layout.head or kind is not OpKind.HEAD_W)

    @cached_property
    def only(self) -> Ints:
        """`[kind]` -> the one stage that has it, as the embedding and the head have; else NEVER."""
        only = np.full(len(OpKind), NEVER, np.int32)
        only[list(EMBEDDING)], only[list(HEAD)] = 0, self.layout.placement.num_stages - 1
        return only

    @cached_property
    def tables(self) -> Tables:
        """All of it for kernels."""
        layout, (role, before) = self.layout, self._roles
        return Tables(
            layout.num_replicas,
            *self.shape,
            stage=self.stage,
            pipe=self.pipe,
            holder=self.holder,
            depth=self.depth,
            slot=self.slot,
            only=self.only,
            makes_gradient=self.makes_gradient,
            role=role,
            before=before,
            last_forward=int(layout.forward[-1]),
            first_backward=int(layout.backward[0]),  # reads what was saved, and so waits for an onload
            last_backward=int(layout.backward[-1]),
        )

    @property
    def _roles(self) -> tuple[Bytes, Ints]:
        """`role[kind]` and `before[kind]`: the part it follows, or -1 for the first of a chain."""
        role, before = np.full(len(OpKind), NOTHING, np.uint8), np.full(len(OpKind), NEVER, np.int32)
        for chain, part in ((self.layout.forward, FORWARD_PART), (self.layout.backward, BACKWARD_PART)):
            for place, kind in enumerate(chain):
                role[kind] = part
                before[kind] = chain[place - 1] if place else NEVER
        if not self.layout.by_layer:
            role[OpKind.I] = BACKWARD_PART
        for kind in self.weights:
            role[kind], before[kind] = FOLLOWS, WEIGHT_OF[kind]
        if self.layout.embedding:
            role[OpKind.EMBED_B], before[OpKind.EMBED_B] = FOLLOWS, self.layout.backward[-1]
        if self.layout.head:
            role[OpKind.HEAD_F] = HEAD_PART
            role[OpKind.HEAD_B], before[OpKind.HEAD_B] = FOLLOWS, OpKind.HEAD_F
        role[[OpKind.SEND_F, OpKind.SEND_B]] = SEND
        role[OpKind.OFFLOAD], role[OpKind.ONLOAD], role[OpKind.REDUCE_GRAD] = OFFLOAD, ONLOAD, REDUCE
        return role, before

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sizes of the index: rank, chunk, micro-batch, layer, kind."""
        layout = self.layout
        return (layout.num_ranks, layout.placement.vpp, layout.num_mb, layout.max_layers, len(self.kinds))

    @property
    def makes_gradient(self) -> Bools:
        """`[kind]`: does its end add to a weight gradient."""
        made = np.zeros(len(OpKind), bool)
        layout = self.layout
        made[list(self.weights)] = True
        split = {WEIGHT_OF[kind] for kind in self.weights}
        whole = [k for k in (OpKind.B, OpKind.MLP_B, OpKind.ATTN_B) if k in layout.backward and k not in split]
        made[whole] = True
        made[OpKind.EMBED_B] = layout.embedding
        made[OpKind.HEAD_B] = layout.head and OpKind.HEAD_B not in split
        return made
