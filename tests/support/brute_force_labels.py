"""The labels of a layout's ops, restated for the brute-force executor: which there are, and what they need.

It was written from "Programs" of docs/reference/semantics.md alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, TypeAlias

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Layout

SENDS = (OpKind.SEND_F, OpKind.SEND_B)
RECEIVES = (OpKind.RECV_F, OpKind.RECV_B)
MESSAGES = SENDS + RECEIVES
COPIES = (OpKind.OFFLOAD, OpKind.ONLOAD)
STEP_ENDS = (OpKind.CLIP, OpKind.OPTIMIZER, OpKind.GATHER_PARAMS)

COMPUTING = (OpKind.ATTN_F, OpKind.MLP_F, OpKind.MLP_B, OpKind.ATTN_B)
"""The parts that a dense layer has."""

WEIGHT_HALF = {
    OpKind.MLP_B: OpKind.MLP_W,
    OpKind.ATTN_B: OpKind.ATTN_W,
    OpKind.MTP_B: OpKind.MTP_W,
    OpKind.HEAD_B: OpKind.HEAD_W,
    OpKind.I: OpKind.W,
}
INPUT_HALF = {weight: backward for backward, weight in WEIGHT_HALF.items()}
RECOMPUTED = {OpKind.ATTN_B: OpKind.ATTN_R, OpKind.MLP_B: OpKind.MLP_R}
"""What a backward part waits for where its forward is computed again."""

COMPUTES_AGAIN = {OpKind.ATTN_R: OpKind.ATTN_F, OpKind.MLP_R: OpKind.MLP_F}
MAY_MAKE_GRADIENTS = (OpKind.MLP_B, OpKind.ATTN_B, OpKind.MTP_B, OpKind.HEAD_B, OpKind.B, OpKind.EMBED_B)


OPS_OF_BLOCKS = {
    "E": (OpKind.EMBED_F, OpKind.EMBED_B),
    "m": (OpKind.MTP_F, OpKind.MTP_B, OpKind.MTP_W),
    "L": (OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W),
    "dt": (*COMPUTING, OpKind.MLP_W, OpKind.ATTN_W),
}
"""The ops on a compute lane that read a block's parameters or may make gradients of them."""

OF_BUCKETS = (OpKind.REDUCE_SCATTER, OpKind.GATHER_PARAMS)


class Name(NamedTuple):
    """The label of an op. A message's chunk is its reader's."""

    kind: OpKind
    rank: int
    chunk: int
    mb: int
    layer: int

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind.name} {self.mb}.{self.chunk} L{self.layer}"


Holder: TypeAlias = tuple[int, int]
"""A rank and one of its chunks."""

Part: TypeAlias = tuple[OpKind, int]
"""A kind and a layer: an op of a stage, for any micro-batch."""


class Chains:
    """The ops that a stage has for each micro-batch."""

    def __init__(self, layout: Layout, stage: int) -> None:
        self.by_layer = layout.forward != (OpKind.F,)
        self.layers: list[list[Part]] = []
        """The forward parts of each layer."""
        self.first_backward: list[Part] = []
        """The first backward part of each layer, as far as it has any."""
        self.forward: list[Part] = []
        self.backward: list[Part] = []
        self.again: list[Part] = []
        self.weights: list[Part] = []
        if self.by_layer:
            self._add_blocks(layout, layout.blocks[stage])
        else:
            self.forward, self.backward, self.weights = [(OpKind.F, 0)], [(OpKind.B, 0)], [(OpKind.W, 0)]
        others = [] if self.by_layer else [(OpKind.I, 0)]
        self.all = frozenset((*self.forward, *self.backward, *self.weights, *self.again, *others))

    def _add_blocks(self, layout: Layout, row: str) -> None:
        backwards: list[list[Part]] = []
        for place, letter in enumerate(row):
            before = row[:place]
            if letter == "E":
                forward, backward = [(OpKind.EMBED_F, 0)], [(OpKind.EMBED_B, 0)]
            elif letter == "L":
                forward, backward = [(OpKind.HEAD_F, 0)], [(OpKind.HEAD_B, 0)]
            elif letter == "m":
                number = before.count("m")
                forward, backward = [(OpKind.MTP_F, number)], [(OpKind.MTP_B, number)]
            else:
                number = before.count("d") + before.count("t")
                forward = [(kind, number) for kind in layout.forward if letter == "t" or kind in COMPUTING]
                backward = [(kind, number) for kind in layout.backward if letter == "t" or kind in COMPUTING]
                self.layers.append(forward)
                self.first_backward += backward[:1]
                self.again += [(kind, number) for kind in layout.recomputed]
            self.forward += forward
            backwards.append(backward)
        for backward in reversed(backwards):
            self.backward += backward
        halves = [(WEIGHT_HALF[kind], number) for kind, number in self.backward if kind in WEIGHT_HALF]
        self.weights = [(kind, number) for kind, number in halves if kind in layout.weights]


class Rules:
    """What the text says of the labels of a layout: which there are, and what they need of each other."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._placement = layout.placement
        self._replicas = layout.dp * layout.ep
        self.ranks = range(len(self._placement.stages) * self._replicas)
        self.chunks = range(len(self._placement.pipes))
        self.mbs = range(layout.num_mb)
        self.of_stage = [Chains(layout, stage) for stage in range(len(layout.blocks))]
        self.by_layer = self.of_stage[0].by_layer
        self._holder = {
            (self._placement.pipes[chunk], stage): (row, chunk)
            for row, stages in enumerate(self._placement.stages)
            for chunk, stage in enumerate(stages)
        }

    def split(self, kind: OpKind) -> bool:
        """Has a backward op a weight half of its own."""
        return kind in WEIGHT_HALF and (WEIGHT_HALF[kind] in self.layout.weights if self.by_layer else True)

    def stage(self, rank: int, chunk: int) -> int | None:
        """The stage that a rank's chunk is, if there are such."""
        if rank not in self.ranks or chunk not in self.chunks:
            return None
        return self._placement.stages[rank // self._replicas][chunk]

    def chains(self, rank: int, chunk: int) -> Chains:
        """Of a rank and a chunk that there are."""
        stage = self.stage(rank, chunk)
        assert stage is not None
        return self.of_stage[stage]

    def beside(self, rank: int, chunk: int, step: int) -> Holder | None:
        """Who holds the stage so many further along the same pipe, in the same replica."""
        stage = self.stage(rank, chunk)
        if stage is None:
            return None
        held = self._holder.get((self._placement.pipes[chunk], stage + step))
        if held is None:
            return None
        return held[0] * self._replicas + rank % self._replicas, held[1]

    def tied_chunks(self, rank: int, tie: int) -> list[int]:
        """The chunks of a rank whose stages are in a tie."""
        return [chunk for chunk in self.chunks if self.stage(rank, chunk) in self.layout.tied[tie]]

    def buckets(self, rank: int, chunk: int) -> tuple[int, ...]:
        """The first blocks of the buckets of a chunk that there is."""
        stage = self.stage(rank, chunk)
        assert stage is not None
        return self.layout.buckets[stage] if self.layout.buckets else ()

    def block(self, name: Name) -> int:
        """The place of an op's block in the row of its stage; a cell is of all of them, so of the first."""
        stage = self.stage(name.rank, name.chunk)
        assert stage is not None
        if not self.by_layer:
            return 0
        letters = next(of for of, kinds in OPS_OF_BLOCKS.items() if name.kind in kinds)
        places = [place for place, letter in enumerate(self.layout.blocks[stage]) if letter in letters]
        return places[name.layer]

    def knows(self, name: Name, lane: LaneKind, peer: int) -> bool:
        kind, rank, chunk, mb, layer = name
        if self.stage(rank, chunk) is None or lane != kind.lane:
            return False
        if kind in (OpKind.REDUCE_GRAD, OpKind.REDUCE_SCATTER, OpKind.REDUCE_TIED, *STEP_ENDS):
            return mb == -1 and self._knows_end(name)
        if mb not in self.mbs:
            return False
        if kind in MESSAGES:
            return layer == 0 and (kind in RECEIVES or self._feeder(name, peer)[0] == rank)
        chains = self.chains(rank, chunk)
        if kind in COPIES:
            return layer in range(len(chains.layers))
        return (kind, layer) in chains.all

    def _knows_end(self, name: Name) -> bool:
        """Of what there is once a step."""
        kind, rank, chunk, _, layer = name
        if kind == OpKind.REDUCE_TIED:
            return layer in range(len(self.layout.tied)) and self.tied_chunks(rank, layer)[:1] == [chunk]
        if self.layout.buckets and kind in OF_BUCKETS:
            return layer in range(len(self.buckets(rank, chunk)))
        if kind == OpKind.REDUCE_GRAD:
            return layer == 0 and not self.layout.buckets
        return kind in self.layout.step_end and chunk == layer == 0

    def _feeder(self, name: Name, peer: int) -> Holder:
        """Who makes what the reader of a send, at its lane's peer, reads."""
        step = -1 if name.kind == OpKind.SEND_F else +1
        return self.beside(peer, name.chunk, step) or (-1, -1)

    def needs(self, name: Name, peer: int, copied: set[Name]) -> Iterator[tuple[Name, ...]]:
        """What a known op needs, each as the names that will do.

        Reductions and the end of a step need ops by their indices; those are not for names to say.
        """
        kind, rank, chunk, mb, layer = name
        chains = self.chains(rank, chunk)
        part = (OpKind.B if kind == OpKind.I else kind, layer)
        # of cells none is copied
        onload = [name._replace(kind=OpKind.ONLOAD)] if self._is_copied(name, copied) else []
        if part in chains.forward:
            yield from self._forward_needs(name, chains.forward.index(part))
        elif part in chains.backward:
            yield from self._backward_needs(name, chains.backward.index(part))
            if part in chains.first_backward:
                yield from ((copy,) for copy in onload)
            if (RECOMPUTED.get(kind), layer) in chains.again:
                yield (name._replace(kind=RECOMPUTED[kind]),)
        elif part in chains.again:
            yield (name._replace(kind=COMPUTES_AGAIN[kind]),)
            yield from ((copy,) for copy in onload)
        elif part in chains.weights:
            yield (name._replace(kind=INPUT_HALF[kind]),)
        elif kind == OpKind.SEND_F:
            yield self._leaves(self._feeder(name, peer), mb)
        elif kind == OpKind.SEND_B:
            yield self._returns(self._feeder(name, peer), mb)
        elif kind == OpKind.OFFLOAD:
            yield tuple(name._replace(kind=last) for last, _ in chains.layers[layer][-1:])
        elif kind == OpKind.ONLOAD:
            yield (name._replace(kind=OpKind.OFFLOAD),)

    def _is_copied(self, name: Name, copied: set[Name]) -> bool:
        return not copied.isdisjoint(name._replace(kind=copy) for copy in COPIES)

    def _forward_needs(self, name: Name, place: int) -> Iterator[tuple[Name, ...]]:
        holder = name.rank, name.chunk
        if place > 0:
            yield (self._named(self.chains(*holder).forward[place - 1], holder, name.mb),)
            return
        origin = self.beside(*holder, -1)
        if origin is not None and origin[0] != name.rank:
            yield (name._replace(kind=OpKind.RECV_F, layer=0),)
        elif origin is not None:
            yield self._leaves(origin, name.mb)

    def _backward_needs(self, name: Name, place: int) -> Iterator[tuple[Name, ...]]:
        holder = name.rank, name.chunk
        if place > 0:
            yield (self._named(self.chains(*holder).backward[place - 1], holder, name.mb),)
            return
        yield self._leaves(holder, name.mb)
        origin = self.beside(*holder, +1)
        if origin is not None and origin[0] != name.rank:
            yield (name._replace(kind=OpKind.RECV_B, layer=0),)
        elif origin is not None:
            yield self._returns(origin, name.mb)

    def _named(self, part: Part, holder: Holder, mb: int) -> Name:
        return Name(part[0], *holder, mb, part[1])

    def _leaves(self, holder: Holder, mb: int) -> tuple[Name, ...]:
        """What makes a stage's output: the last of its forward chain."""
        return tuple(self._named(part, holder, mb) for part in self.chains(*holder).forward[-1:])

    def _returns(self, holder: Holder, mb: int) -> tuple[Name, ...]:
        """What makes the gradient of a stage's input: the last of its backward chain; of cells B or I."""
        last = self.chains(*holder).backward[-1:] if self.by_layer else [(OpKind.B, 0), (OpKind.I, 0)]
        return tuple(self._named(part, holder, mb) for part in last)

    def is_backward(self, kind: OpKind) -> bool:
        """Is a kind one of a backward chain."""
        return kind == OpKind.I or any(kind == of for chains in self.of_stage for of, _ in chains.backward)

    def makes_gradient(self, kind: OpKind) -> bool:
        """Does a kind make a weight gradient: a weight half, or a backward op that has none split off."""
        return kind in INPUT_HALF or (kind in MAY_MAKE_GRADIENTS and not self.split(kind))

    def required(self) -> Iterator[tuple[Name, int]]:
        """What must be there once, with the peer of a send (else -1).

        Cells, copies, reductions and the end of a step come besides.
        """
        for rank, chunk, mb in product(self.ranks, self.chunks, self.mbs):
            if self.by_layer:
                for part in self.chains(rank, chunk).all:
                    yield self._named(part, (rank, chunk), mb), -1
            for step, receive, send in ((-1, OpKind.RECV_F, OpKind.SEND_F), (+1, OpKind.RECV_B, OpKind.SEND_B)):
                origin = self.beside(rank, chunk, step)
                if origin is not None and origin[0] != rank:
                    yield Name(receive, rank, chunk, mb, 0), -1
                    yield Name(send, origin[0], chunk, mb, 0), rank

    def required_once_a_step(self) -> Iterator[Name]:
        """Reductions of ties and the end of a step, where there is a backward."""
        for rank in self.ranks:
            for tie in range(len(self.layout.tied)):
                for chunk in self.tied_chunks(rank, tie)[:1]:
                    yield Name(OpKind.REDUCE_TIED, rank, chunk, -1, tie)
            for kind in self.layout.step_end:
                yield Name(kind, rank, 0, -1, 0)
