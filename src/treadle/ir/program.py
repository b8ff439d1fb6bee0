"""A Program: ops on lanes, for every rank, in columns.

A lane is an in-order queue. Ops are stored lane by lane, in order, so the op before `i` on its lane is `i - 1`
unless `i` opens the lane. What an op waits for besides is in `dep`: a compressed list of op indices for each op,
where NEVER stands for something that no op provides. Lanes of one group do their ops together: the k-th op of each
with the k-th of the others, a send with its receive, a collective with its like on every member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.blocks import LAYERS, check_order
from treadle.ir.notebook import ShownInNotebooks
from treadle.ir.placement import Placement

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Shorts: TypeAlias = npt.NDArray[np.int16]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]

NEVER = -1


class OpKind(IntEnum):
    """The work of an op. The first four are whole actions (the grain of cells), then parts of them and messages.

    H2D, BROADCAST and RELOAD are a weight update: a bucket to its source's device, to all devices, and into the served
    model. EMBED, MTP and HEAD are the blocks of a stage besides its layers: the embedding, a block that predicts one
    more token, with a loss of its own, and the head with the loss. ATTN_R and MLP_R compute a part's forward again.
    REDUCE_TIED sums the gradients of a parameter that several stages share. CLIP, OPTIMIZER and GATHER_PARAMS end a
    step. GC and REDUCE_LAYERNORM are what profiles of other trainers have besides: garbage collection, and the
    all-reduce of layer norms' gradients over tensor-parallel ranks.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's own name
    W = 3
    SEND_F = 4
    SEND_B = 5
    RECV_F = 6
    RECV_B = 7
    ATTN_F = 8
    COUNTS = 9
    HOST = 10
    DISPATCH_F = 11
    MLP_F = 12
    COMBINE_F = 13
    COMBINE_B = 14
    MLP_B = 15
    DISPATCH_B = 16
    ATTN_B = 17
    MLP_W = 18
    ATTN_W = 19
    OFFLOAD = 20
    ONLOAD = 21
    REDUCE_GRAD = 22
    H2D = 23
    BROADCAST = 24
    RELOAD = 25
    EMBED_F = 26
    EMBED_B = 27
    HEAD_F = 28
    HEAD_B = 29
    HEAD_W = 30
    MTP_F = 31
    MTP_B = 32
    MTP_W = 33
    ATTN_R = 34
    MLP_R = 35
    REDUCE_TIED = 36
    CLIP = 37
    OPTIMIZER = 38
    GATHER_PARAMS = 39
    GC = 40
    REDUCE_LAYERNORM = 41

    @property
    def is_send(self) -> bool:
        """True for ops that send a message to a peer."""
        return self in (OpKind.SEND_F, OpKind.SEND_B)

    @property
    def is_recv(self) -> bool:
        """True for ops that receive a message from a peer."""
        return self in (OpKind.RECV_F, OpKind.RECV_B)


class LaneKind(IntEnum):
    """The work that a lane queues.

    A rank has one SEND and one RECV lane for each peer, one TIED lane for each tie, one at most of the others.
    """

    COMPUTE = 0
    SEND = 1
    RECV = 2
    EP = 3
    OUT = 4
    IN = 5
    DP = 6
    HOST = 7
    H2D = 8
    BROADCAST = 9
    RELOAD = 10
    TIED = 11
    WORLD = 12
    TP = 13


LANE_OF: dict[OpKind, LaneKind] = {
    **dict.fromkeys((OpKind.F, OpKind.B, OpKind.I, OpKind.W), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.ATTN_F, OpKind.MLP_F, OpKind.MLP_B, OpKind.ATTN_B), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.MLP_W, OpKind.ATTN_W), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.EMBED_F, OpKind.EMBED_B), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.MTP_F, OpKind.MTP_B, OpKind.MTP_W), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.ATTN_R, OpKind.MLP_R, OpKind.OPTIMIZER, OpKind.GC), LaneKind.COMPUTE),
    **dict.fromkeys((OpKind.SEND_F, OpKind.SEND_B), LaneKind.SEND),
    **dict.fromkeys((OpKind.RECV_F, OpKind.RECV_B), LaneKind.RECV),
    **dict.fromkeys((OpKind.COUNTS, OpKind.DISPATCH_F, OpKind.COMBINE_F), LaneKind.EP),
    **dict.fromkeys((OpKind.COMBINE_B, OpKind.DISPATCH_B), LaneKind.EP),
    OpKind.HOST: LaneKind.HOST,
    OpKind.OFFLOAD: LaneKind.OUT,
    OpKind.ONLOAD: LaneKind.IN,
    OpKind.REDUCE_GRAD: LaneKind.DP,
    OpKind.REDUCE_TIED: LaneKind.TIED,
    OpKind.CLIP: LaneKind.WORLD,
    OpKind.REDUCE_LAYERNORM: LaneKind.TP,
    OpKind.GATHER_PARAMS: LaneKind.DP,
    OpKind.H2D: LaneKind.H2D,
    OpKind.BROADCAST: LaneKind.BROADCAST,
    OpKind.RELOAD: LaneKind.RELOAD,
}
"""The lane that each kind of op runs on."""

UPDATE = (OpKind.H2D, OpKind.BROADCAST, OpKind.RELOAD)
"""The ops of a weight update."""

EMBEDDING = (OpKind.EMBED_F, OpKind.EMBED_B)
HEAD = (OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W)
"""Ops of the first and of the last stage that belong to no layer."""

MTP = (OpKind.MTP_F, OpKind.MTP_B, OpKind.MTP_W)
"""Ops of a block that predicts one more token; their `layer` counts such blocks of their stage."""

RECOMPUTE = {OpKind.ATTN_R: OpKind.ATTN_F, OpKind.MLP_R: OpKind.MLP_F}
"""What computes a forward part again, and that part."""

STEP_END = (OpKind.CLIP, OpKind.OPTIMIZER, OpKind.GATHER_PARAMS)
"""Ops behind all gradients of a step, one of each a rank: micro-batch -1, chunk and layer 0."""

MEASURED_ONLY = (OpKind.GC, OpKind.REDUCE_LAYERNORM)
"""Ops that only measured steps have: no pass makes them, and costs have no time for them."""

STEP_ENDS = (
    (),
    (OpKind.OPTIMIZER,),
    (OpKind.CLIP, OpKind.OPTIMIZER),
    (OpKind.OPTIMIZER, OpKind.GATHER_PARAMS),
    STEP_END,
)
"""What a step may end with."""

EXCHANGES = (
    OpKind.COUNTS,
    OpKind.HOST,
    OpKind.DISPATCH_F,
    OpKind.COMBINE_F,
    OpKind.COMBINE_B,
    OpKind.DISPATCH_B,
)
"""The parts of a layer that a dense layer does not have."""

COMMUNICATION = (
    LaneKind.SEND,
    LaneKind.RECV,
    LaneKind.EP,
    LaneKind.DP,
    LaneKind.BROADCAST,
    LaneKind.TIED,
    LaneKind.WORLD,
    LaneKind.TP,
)
"""The lanes that have a communicator, and so a place in their rank's launch order."""


SAVED_UNITS = ("bytes", "layers", "activations")
"""What the sizes in a Layout's `saved` count."""


@dataclass(frozen=True)
class Lane:
    """An in-order queue of a rank; `peer` is the other end of its channel, of a TIED lane its tie, or -1."""

    rank: int
    kind: LaneKind
    peer: int

    @property
    def name(self) -> str:
        """The name without the rank: `compute`, `send to rank 3`."""
        if self.kind in (LaneKind.SEND, LaneKind.RECV):
            preposition = "to" if self.kind is LaneKind.SEND else "from"
            return f"{self.kind.name.lower()} {preposition} rank {self.peer}"
        if self.kind is LaneKind.TIED and self.peer >= 0:
            return f"tied {self.peer}"
        return self.kind.name.lower()

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name}"


@dataclass(frozen=True)
class Op:
    """One op of a Program as a Python object."""

    index: int
    kind: OpKind
    lane: Lane
    mb: int
    chunk: int
    layer: int
    cell: int

    @property
    def label(self) -> str:
        """The action or the message, `F3.1`; at the grain of layers `attn_f 3.1 L0`; of an update `reload 0.3`."""
        if self.kind <= OpKind.RECV_B:
            return f"{self.kind.name[-1]}{self.mb}.{self.chunk}"
        if self.kind in UPDATE:
            return f"{self.kind.name.lower()} {self.mb}.{self.layer}"
        if self.kind in STEP_END or self.kind in MEASURED_ONLY:
            return self.kind.name.lower()
        if self.kind in (OpKind.REDUCE_GRAD, OpKind.REDUCE_TIED):
            return f"{self.kind.name.lower()} .{self.chunk}"
        if self.kind in EMBEDDING or self.kind in HEAD:
            return f"{self.kind.name.lower()} {self.mb}.{self.chunk}"
        return f"{self.kind.name.lower()} {self.mb}.{self.chunk} L{self.layer}"

    def __str__(self) -> str:
        if self.kind.is_send:
            return f"send {self.label} to rank {self.lane.peer}"
        if self.kind.is_recv:
            return f"receive {self.label} from rank {self.lane.peer}"
        return self.label


@dataclass(frozen=True)
class Layout:
    """The pipeline, its blocks and the mesh that the labels of a Program's ops refer to.

    `blocks[stage]` is the row of a stage's blocks, a letter each: E embedding, d dense layer, t MoE layer (or just a
    layer), m MTP block with a loss of its own, L head with the loss. At the grain of cells they may be unknown: empty
    for every stage. `forward` and `backward` are the parts of a layer in order, at the grain of cells (F) and (B); a
    dense layer has those of them that compute. `recomputed` are the parts that are computed again before their backward
    (ATTN_R, MLP_R).

    `saved` says what a forward op or a recomputed part leaves in memory until its weight half ends (or its backward,
    where that is not split); `dense_saved` what it leaves in a dense layer instead; `kept` is the fraction that stays
    between the two. `stage_scale` and `mb_scale` multiply it, by stage and by micro-batch (pipe after pipe); empty, all
    are alike. At the grain of cells with known blocks `saved[F]` is what one layer leaves, and EMBED_F, MTP_F and
    HEAD_F are what those blocks leave besides. `saved_unit` says what `saved` counts: bytes, activations (one a chunk
    and micro-batch) or layers (one a layer and micro-batch; at the grain of layers its parts count a half each, so 2
    make a layer). Ranks are numbered `(pp * dp + d) * ep + e`.

    `tied` are the ties: the stages that share a parameter. `step_end` are the ops that end a step.

    A weight update has neither forward nor backward: `dp` are its devices, `num_mb` its rounds. Of its ops `mb` is the
    round, `layer` the source, `chunk` the buffer that the op fills or reads (-1: an H2D straight into an IPC buffer)
    and `cell` the bucket's place in the order of broadcast.
    """

    placement: Placement
    num_mb: int
    blocks: tuple[str, ...]
    forward: tuple[OpKind, ...]
    backward: tuple[OpKind, ...]
    weights: tuple[OpKind, ...]
    ep: int = 1
    dp: int = 1
    saved: dict[OpKind, int] = field(default_factory=dict)
    kept: float = 1.0
    saved_unit: str = "bytes"
    recomputed: tuple[OpKind, ...] = ()
    dense_saved: dict[OpKind, int] = field(default_factory=dict)
    stage_scale: tuple[float, ...] = ()
    mb_scale: tuple[float, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    step_end: tuple[OpKind, ...] = ()

    def __post_init__(self) -> None:
        if self.saved_unit not in SAVED_UNITS:
            raise ValueError(f"saved_unit is {', '.join(SAVED_UNITS)}, got {self.saved_unit!r}")
        if all(self.blocks):
            check_order(self.blocks)
        elif any(self.blocks) or self.by_layer:
            raise ValueError(
                f"blocks are unknown for every stage (at the grain of cells) or one or more for each, got {self.blocks}"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name, wanted in (("stage_scale", self.placement.num_stages), ("mb_scale", self.num_microbatches)):
            got = len(getattr(self, name))
            if got not in (0, wanted):
                raise ValueError(f"{name} has a number for each of {wanted}, or none, got {got}")
        for tie in self.tied:
            if len(tie) < 2 or not set(tie) <= set(range(self.placement.num_stages)) or sorted(set(tie)) != list(tie):
                last = self.placement.num_stages - 1
                raise ValueError(f"a tie is two or more different stages from 0 to {last}, in order, got {tie}")
        if bool(self.forward) != bool(self.backward):
            raise ValueError(
                f"a step has forward and backward parts, an update neither, got {self.forward} and {self.backward}"
            )
        if any("d" in row for row in self.blocks) and self.by_layer:
            for parts in (self.forward, self.backward):
                if not set(parts) - set(EXCHANGES):
                    raise ValueError(f"a dense layer has a part that computes, got none in {parts}")
        if set(self.recomputed) - set(RECOMPUTE):
            raise ValueError(f"recomputed parts are ATTN_R and MLP_R, got {self.recomputed}")
        if self.step_end not in STEP_ENDS:
            raise ValueError(
                f"a step ends with OPTIMIZER, or CLIP before it, GATHER_PARAMS after it, got {self.step_end}"
            )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage; 0 for every stage where they are not known."""
        return tuple(sum(row.count(letter) for letter in LAYERS) for row in self.blocks)

    @property
    def embedding(self) -> bool:
        """True if the first stage has an embedding before its layers."""
        return self.blocks[0].startswith("E")

    @property
    def head(self) -> bool:
        """True if the last stage has a head, which ends in the loss, behind its layers."""
        return self.blocks[-1].endswith("L")

    @property
    def num_mtp(self) -> int:
        """MTP blocks of the whole model."""
        return sum(row.count("m") for row in self.blocks)

    @property
    def max_layers(self) -> int:
        """Layers, or MTP blocks, of the stage that has most of them; at the grain of cells 1."""
        return max(1, *self.layers, *(row.count("m") for row in self.blocks)) if self.by_layer else 1

    @property
    def model_layers(self) -> int:
        """Layers of the whole model; 0 where they are not known."""
        return sum(self.layers)

    @property
    def num_replicas(self) -> int:
        """Pipelines side by side."""
        return self.ep * self.dp

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipelines."""
        return self.placement.pp * self.num_replicas

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step, over all pipes."""
        return self.num_mb * self.placement.num_pipes

    @property
    def by_layer(self) -> bool:
        """True at the grain of layers, False at the grain of cells."""
        return bool(self.forward) and OpKind.F not in self.forward

    @property
    def is_update(self) -> bool:
        """True for a weight update, False for a training step."""
        return not self.forward


_OP_COLUMNS = ("kind", "mb", "chunk", "layer", "cell", "launch", "size_bytes", "joined")
_LANE_COLUMNS = ("lane_ptr", "lane_rank", "lane_kind", "lane_peer", "lane_group")
COLUMNS = (*_OP_COLUMNS, *_LANE_COLUMNS, "dep_ptr", "dep")
"""The arrays of a Program, in the order they are stored."""


@dataclass(frozen=True, eq=False, repr=False)
class Program(ShownInNotebooks):
    """Ops on lanes: columns over ops, columns over lanes, and dependencies.

    `cell[i]`: which cell of its rank's row an op runs in or beside (a send with its maker, a receive with its reader),
    or -1.
    `joined[i]`: op i starts and ends together with op i - 1 of its lane (the halves of an overlapped cell).
    `launch[i]`: the op's place in the order in which its rank launches communication, or -1.
    `lane_group[l]`: lanes of one group do their ops together; -1 for a lane on its own.

    Example:
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), treadle.load_costs("unit"))
        >>> str(program.op(0)), str(program.lane(0))
        ('F0.0', 'rank 0 compute')

    """

    layout: Layout
    kind: Bytes
    mb: Ints
    chunk: Shorts
    layer: Shorts
    cell: Ints
    launch: Ints
    size_bytes: Longs
    joined: Bools
    lane_ptr: Longs
    lane_rank: Ints
    lane_kind: Bytes
    lane_peer: Ints
    lane_group: Ints
    dep_ptr: Longs
    dep: Ints

    def __repr__(self) -> str:
        """Return the size: the columns are too long to read."""
        return f"<Program: {self.num_ranks} ranks, {self.num_lanes} lanes, {self.num_ops} ops>"

    @property
    def num_ops(self) -> int:
        """Ops over all ranks."""
        return len(self.kind)

    @property
    def num_lanes(self) -> int:
        """Lanes over all ranks."""
        return len(self.lane_rank)

    @property
    def num_ranks(self) -> int:
        """Ranks that have lanes."""
        return int(self.lane_rank.max(initial=-1)) + 1

    @cached_property
    def lane_of(self) -> Ints:
        """The lane of each op."""
        return np.repeat(np.arange(self.num_lanes, dtype=np.int32), np.diff(self.lane_ptr))

    @cached_property
    def groups(self) -> tuple[Longs, Ints]:
        """The lanes of each group, compressed; within a group in the order of the lanes."""
        grouped = np.flatnonzero(self.lane_group >= 0).astype(np.int32)
        order = np.argsort(self.lane_group[grouped], kind="stable")
        count = np.bincount(self.lane_group[grouped], minlength=int(self.lane_group.max(initial=-1)) + 1)
        return np.r_[0, np.cumsum(count)].astype(np.int64), grouped[order]

    def lane(self, index: int) -> Lane:
        """Return a lane as a Python object."""
        return Lane(int(self.lane_rank[index]), LaneKind(int(self.lane_kind[index])), int(self.lane_peer[index]))

    def op(self, index: int) -> Op:
        """Return an op as a Python object."""
        lane = int(np.searchsorted(self.lane_ptr, index, side="right")) - 1
        return Op(
            index,
            OpKind(int(self.kind[index])),
            self.lane(lane),
            int(self.mb[index]),
            int(self.chunk[index]),
            int(self.layer[index]),
            int(self.cell[index]),
        )

    def deps(self, index: int) -> list[int]:
        """List the ops that an op waits for besides its lane."""
        return [int(d) for d in self.dep[self.dep_ptr[index] : self.dep_ptr[index + 1]]]
