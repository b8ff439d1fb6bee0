"""A Program: ops on lanes, for every rank, in columns.

A lane is an in-order queue. Ops are stored lane by lane, in order, so the op before `i` on its lane is `i - 1`
unless `i` opens the lane. What an op waits for besides is in `dep`: a compressed list of op indices for each op,
where NEVER stands for something that no op provides. Lanes of one group do their ops together: the k-th op of each
with the k-th of the others, a send with its receive, a collective with its like on every member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.blocks import LAYERS, check_order
from treadle.ir.notebook_forms import ShownInNotebooks
from treadle.ir.ops import BUCKET_OPS, STEP_END, STEP_ENDS, LaneKind, OpKind, OpPhase, OpRole, where
from treadle.ir.placement import Placement

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Shorts: TypeAlias = npt.NDArray[np.int16]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]

NEVER = -1


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
    by_bucket: bool = False
    """Whether gradients and parameters of its Program go by bucket, whose number is then the layer of such an op."""

    @property
    def label(self) -> str:
        """The action or the message, `F3.1`; at the grain of layers `attn_f 3.1 L0`; of an update `reload 0.3`."""
        kind, name = self.kind, self.kind.name.lower()
        if kind.role in (OpRole.ACTION, OpRole.MESSAGE):
            return f"{kind.name[-1]}{self.mb}.{self.chunk}"
        if kind.role is OpRole.UPDATE:
            return f"{'bucket' if kind.is_send or kind.is_recv else name} {self.mb}.{self.layer}"
        if self.by_bucket and kind in BUCKET_OPS:
            return f"{name} .{self.chunk} b{self.layer}"
        if kind.role in (OpRole.STEP_END, OpRole.MEASURED):
            return name
        if kind.role is OpRole.REDUCTION:
            return f"{name} .{self.chunk}"
        return f"{name} {self.mb}.{self.chunk}" + (f" L{self.layer}" if kind.has_layer else "")

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
    HEAD_F are what those blocks leave besides. `saved[OFFLOAD]` is what an offload copies of a layer; without it, all
    that its forward parts saved. `saved_unit` says what `saved` counts: bytes, activations (one a chunk
    and micro-batch) or layers (one a layer and micro-batch; at the grain of layers its parts count a half each, so 2
    make a layer). Ranks are numbered `(pp * dp + d) * ep + e`.

    `tied` are the ties: the stages that share a parameter. `step_end` are the ops that end a step.

    `buckets[stage]` are the first blocks of a stage's buckets, in the order of a backward: (3, 1, 0) are block 3 and
    those after it, blocks 1 and 2, and block 0. Gradients are reduce-scattered by bucket then, and parameters gathered.
    Empty: REDUCE_GRAD reduces a chunk at once, and GATHER_PARAMS, if there is one, ends the step.

    A weight update has neither forward nor backward: `dp` are its devices, `num_mb` its rounds. Of its ops `mb` is the
    round, `layer` the source, `chunk` the buffer that the op fills or reads (-1: an H2D straight into an IPC buffer)
    and `cell` the bucket's number, its place in the order in which buckets move.
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
    buckets: tuple[tuple[int, ...], ...] = ()

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
                if not any("d" in part.blocks for part in parts):
                    raise ValueError(f"a dense layer has a part that computes, got none in {parts}")
        if not set(self.recomputed) <= set(where(phase=OpPhase.R)):
            allowed = " and ".join(kind.name for kind in where(phase=OpPhase.R))
            raise ValueError(f"recomputed parts are {allowed}, got {self.recomputed}")
        if self.step_end not in STEP_ENDS:
            allowed = ", ".join(kind.name for kind in STEP_END)
            raise ValueError(f"a step ends with these in order, OPTIMIZER among them: {allowed}; got {self.step_end}")
        self._check_buckets()

    def _check_buckets(self) -> None:
        if not self.buckets:
            return
        if len(self.buckets) != self.placement.num_stages:
            raise ValueError(f"buckets are given of each of {self.placement.num_stages} stages, got {self.buckets}")
        for row, firsts in zip(self.blocks, self.buckets, strict=True):
            most = len(row) if self.by_layer else 1
            if not firsts or firsts[-1] != 0 or firsts[0] >= most or any(a <= b for a, b in pairwise(firsts)):
                raise ValueError(
                    f"a stage's buckets are their first blocks, each below the one before and the last 0, of {most}, "
                    f"got {firsts}"
                )
        if OpKind.GATHER_PARAMS in self.step_end:
            raise ValueError("GATHER_PARAMS begins a step with buckets, and cannot end it; leave it out of step_end")

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
    def max_numbers(self) -> int:
        """How many numbers the layer of an op has: layers, or MTP blocks, buckets or ties, whichever are most."""
        return max(self.max_layers, len(self.tied), *map(len, self.buckets))

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

    @classmethod
    def empty(cls, layout: Layout) -> Program:
        """Return a Program without lanes; `treadle.passes.append` adds them."""
        return cls(
            layout=layout,
            kind=np.empty(0, np.uint8),
            mb=np.empty(0, np.int32),
            chunk=np.empty(0, np.int16),
            layer=np.empty(0, np.int16),
            cell=np.empty(0, np.int32),
            launch=np.empty(0, np.int32),
            size_bytes=np.empty(0, np.int64),
            joined=np.empty(0, bool),
            lane_ptr=np.zeros(1, np.int64),
            lane_rank=np.empty(0, np.int32),
            lane_kind=np.empty(0, np.uint8),
            lane_peer=np.empty(0, np.int32),
            lane_group=np.empty(0, np.int32),
            dep_ptr=np.zeros(1, np.int64),
            dep=np.empty(0, np.int32),
        )

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
            bool(self.layout.buckets),
        )

    def deps(self, index: int) -> list[int]:
        """List the ops that an op waits for besides its lane."""
        return [int(d) for d in self.dep[self.dep_ptr[index] : self.dep_ptr[index + 1]]]
