"""The table of ops: one row an op kind. Every other table of kinds is read from its columns.

    number  the value in files: it never changes, and a new kind takes the next one
    lane    the lane that queues it
    role    what it does in a step
    part    the part of a cell or of a block that it works for, None outside of these
    phase   forward, backward, dgrad, wgrad or recompute; of a message the phase of its maker
    cost    the section of a costs file that has its time, "" where costs have none
    letter  its letter in the terminal
    box     its text in figures
    about   its meaning, as the costs file explains it

A new op kind is one row here (and one of `OpPart` if it is a new part of a block), one template in `passes` that puts
it into a step, and one handler in the runtime that executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from itertools import combinations
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from treadle.ir.blocks import LAYERS


class LaneKind(IntEnum):
    """The work that a lane queues; `communicates` if it has a communicator, and so a place in the launch order.

    A rank has one SEND and one RECV lane for each peer, one TIED lane for each tie, one at most of the others.
    """

    communicates: bool

    def __new__(cls, number: int, communicates: bool = False) -> Self:
        """Make a row."""
        lane = int.__new__(cls, number)
        lane._value_ = number
        lane.communicates = communicates
        return lane

    COMPUTE = 0
    SEND = 1, True
    RECV = 2, True
    EP = 3, True
    OUT = 4
    IN = 5
    DP = 6, True
    HOST = 7
    H2D = 8
    BROADCAST = 9, True
    RELOAD = 10
    TIED = 11, True
    WORLD = 12, True
    TP = 13, True


class OpRole(StrEnum):
    """What ops do in a step."""

    ACTION = "whole action of a cell"
    COMPUTE = "computation of a part of a block"
    EXCHANGE = "exchange of tokens between experts, which dense layers do not have"
    MESSAGE = "message between stages"
    COPY = "copy of a layer's saved activations to the host or back"
    REDUCTION = "reduction of gradients"
    STEP_END = "end of the step, after all gradients: one on each rank, micro-batch -1, chunk and layer 0"
    MEASURED = "in measured steps only: no pass makes it, and costs have no time for it"
    UPDATE = "weight update: a bucket to its source's device, to all devices or one, into the served model"


class OpPhase(StrEnum):
    """The phase of an op that works for a micro-batch. A part's B is its dgrad where its W is split off."""

    F = "forward"
    B = "backward"
    I = "dgrad"  # noqa: E741 - the field's own name
    W = "wgrad"
    R = "recompute"


class OpPart(StrEnum):
    """A part of a block, in the order of a forward; `blocks` are the letters of the blocks that have it."""

    blocks: str

    def __new__(cls, name: str, blocks: str = "") -> Self:
        """Make a row."""
        part = str.__new__(cls, name)
        part._value_ = name
        part.blocks = blocks
        return part

    CELL = "cell"
    EMBED = "embed", "E"
    ATTN = "attn", "td"
    COUNTS = "counts", "t"
    HOST = "host", "t"
    DISPATCH = "dispatch", "t"
    MLP = "mlp", "td"
    COMBINE = "combine", "t"
    MTP = "mtp", "m"
    HEAD = "head", "L"


_COMPUTE, _EP, _SEND, _RECV = LaneKind.COMPUTE, LaneKind.EP, LaneKind.SEND, LaneKind.RECV
_OUT, _IN, _DP, _TIED, _WORLD = LaneKind.OUT, LaneKind.IN, LaneKind.DP, LaneKind.TIED, LaneKind.WORLD
_ACTION, _PART, _EXCHANGE, _MESSAGE = OpRole.ACTION, OpRole.COMPUTE, OpRole.EXCHANGE, OpRole.MESSAGE
_COPY, _REDUCTION, _STEP_END = OpRole.COPY, OpRole.REDUCTION, OpRole.STEP_END
_MEASURED, _UPDATE = OpRole.MEASURED, OpRole.UPDATE
_F, _B, _I, _W, _R = OpPhase.F, OpPhase.B, OpPhase.I, OpPhase.W, OpPhase.R
_SENT = "an activation or a gradient to the next stage"


class OpKind(IntEnum):
    """The kind of an op, with the columns of its row."""

    lane: LaneKind
    role: OpRole
    part: OpPart | None
    phase: OpPhase | None
    cost: str
    letter: str
    box: str
    about: str

    def __new__(cls, number: int, *row: Any) -> Self:
        """Make a row."""
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.lane, kind.role, kind.part, kind.phase, kind.cost, kind.letter, kind.box, kind.about = row
        return kind

    # fmt: off
    F = 0, _COMPUTE, _ACTION, OpPart.CELL, _F, "cells", "F", "F", "forward"
    B = 1, _COMPUTE, _ACTION, OpPart.CELL, _B, "cells", "B", "B", "whole backward; i + w if left out"
    I = 2, _COMPUTE, _ACTION, OpPart.CELL, _I, "cells", "I", "I", "dgrad, the input gradient"  # noqa: E741
    W = 3, _COMPUTE, _ACTION, OpPart.CELL, _W, "cells", "W", "W", "wgrad, the weight gradient"
    SEND_F = 4, _SEND, _MESSAGE, None, _F, "message", ">", "PP", _SENT
    SEND_B = 5, _SEND, _MESSAGE, None, _B, "message", ">", "PP", _SENT
    RECV_F = 6, _RECV, _MESSAGE, None, _F, "message", "<", "PP", _SENT
    RECV_B = 7, _RECV, _MESSAGE, None, _B, "message", "<", "PP", _SENT
    ATTN_F = 8, _COMPUTE, _PART, OpPart.ATTN, _F, "layer", "A", "Attn", "attention and norms, forward"
    COUNTS = 9, _EP, _EXCHANGE, OpPart.COUNTS, _F, "layer", "#", "counts", "exchange of token counts between experts"
    HOST = 10, LaneKind.HOST, _EXCHANGE, OpPart.HOST, _F, "layer", "?", "host", "the host's wait for these counts"
    DISPATCH_F = 11, _EP, _EXCHANGE, OpPart.DISPATCH, _F, "layer", "D", "EP-D", "all-to-all to experts, forward"
    MLP_F = 12, _COMPUTE, _PART, OpPart.MLP, _F, "layer", "M", "MLP", "MLP or experts, forward"
    COMBINE_F = 13, _EP, _EXCHANGE, OpPart.COMBINE, _F, "layer", "C", "EP-C", "all-to-all back, forward"
    COMBINE_B = 14, _EP, _EXCHANGE, OpPart.COMBINE, _B, "layer", "c", "EP-C", "all-to-all back, backward"
    MLP_B = 15, _COMPUTE, _PART, OpPart.MLP, _B, "layer", "m", "MLP", "MLP or experts, dgrad"
    DISPATCH_B = 16, _EP, _EXCHANGE, OpPart.DISPATCH, _B, "layer", "d", "EP-D", "all-to-all to experts, backward"
    ATTN_B = 17, _COMPUTE, _PART, OpPart.ATTN, _B, "layer", "a", "Attn", "attention and norms, dgrad"
    MLP_W = 18, _COMPUTE, _PART, OpPart.MLP, _W, "layer", "w", "WGrad", "MLP or experts, wgrad"
    ATTN_W = 19, _COMPUTE, _PART, OpPart.ATTN, _W, "layer", "w", "WGrad", "attention and norms, wgrad"
    OFFLOAD = 20, _OUT, _COPY, None, None, "message", "O", "Offload", "a layer's saved activations to the host"
    ONLOAD = 21, _IN, _COPY, None, None, "message", "L", "Onload", "a layer's saved activations to the device"
    REDUCE_GRAD = 22, _DP, _REDUCTION, None, None, "message", "R", "reduce", "reduction of a chunk's gradients"
    H2D = 23, LaneKind.H2D, _UPDATE, None, None, "", "H", "H2D", "copy of a bucket from the host to its source's device"
    BROADCAST = 24, LaneKind.BROADCAST, _UPDATE, None, None, "", "D", "bcast", "broadcast of a bucket to all devices"
    RELOAD = 25, LaneKind.RELOAD, _UPDATE, None, None, "", "R", "reload", "copy of a bucket into the served model"
    EMBED_F = 26, _COMPUTE, _PART, OpPart.EMBED, _F, "ends", "E", "Embed", "embedding, forward"
    EMBED_B = 27, _COMPUTE, _PART, OpPart.EMBED, _B, "ends", "e", "Embed", "embedding, backward"
    HEAD_F = 28, _COMPUTE, _PART, OpPart.HEAD, _F, "ends", "H", "Head", "head and loss, forward"
    HEAD_B = 29, _COMPUTE, _PART, OpPart.HEAD, _B, "ends", "h", "Head", "head and loss, dgrad"
    HEAD_W = 30, _COMPUTE, _PART, OpPart.HEAD, _W, "ends", "w", "WGrad", "head, wgrad"
    MTP_F = 31, _COMPUTE, _PART, OpPart.MTP, _F, "ends", "T", "MTP", "MTP block with its loss, forward"
    MTP_B = 32, _COMPUTE, _PART, OpPart.MTP, _B, "ends", "t", "MTP", "MTP block with its loss, dgrad"
    MTP_W = 33, _COMPUTE, _PART, OpPart.MTP, _W, "ends", "w", "WGrad", "MTP block, wgrad"
    ATTN_R = 34, _COMPUTE, _PART, OpPart.ATTN, _R, "layer", "r", "Attn again", "attention and norms, recompute"
    MLP_R = 35, _COMPUTE, _PART, OpPart.MLP, _R, "layer", "r", "MLP again", "MLP or experts, recompute"
    REDUCE_TIED = 36, _TIED, _REDUCTION, None, None, "message", "R", "tied", "reduction of parameters that stages share"
    CLIP = 37, _WORLD, _STEP_END, None, None, "step", "N", "clip", "the norm over all ranks, and clipping"
    OPTIMIZER = 38, _COMPUTE, _STEP_END, None, None, "step", "U", "optimizer", "the optimizer's step"
    GATHER_PARAMS = 39, _DP, _STEP_END, None, None, "step", "G", "gather", "all-gather of parameters"
    GC = 40, _COMPUTE, _MEASURED, None, None, "", "X", "gc", "garbage collection"
    REDUCE_LAYERNORM = 41, LaneKind.TP, _MEASURED, None, None, "", "R", "layernorm", "sum of layer norms' gradients"
    REDUCE_SCATTER = 42, _DP, _REDUCTION, None, None, "message", "R", "reduce", "reduce-scatter of gradients by bucket"
    SEND_BUCKET = 43, _SEND, _UPDATE, None, None, "", ">", "send", "a bucket to a device that takes it"
    RECV_BUCKET = 44, _RECV, _UPDATE, None, None, "", "<", "recv", "a bucket from a device that has it"
    # fmt: on

    @property
    def blocks(self) -> str:
        """The letters of the blocks that have it: E embedding, t MoE layer, d dense layer, m MTP block, L head."""
        return self.part.blocks if self.part is not None else ""

    @property
    def has_layer(self) -> bool:
        """True if it belongs to a layer or an MTP block of its stage; False if a stage has one of it."""
        return self.role is OpRole.COPY or bool(set(self.blocks) & set("tdm"))

    @property
    def cost_key(self) -> str:
        """Its key in the section `cost`; all messages have one time."""
        return "send" if self.role is OpRole.MESSAGE else self.name.lower()

    @property
    def size_key(self) -> str:
        """Its key in [moved_bytes]; "" if it moves nothing, or a layer's saved activations."""
        if self.role in (OpRole.MESSAGE, OpRole.REDUCTION):
            return self.cost_key
        return str(self.part) if self.lane is LaneKind.EP else ""

    @property
    def is_send(self) -> bool:
        """True for ops that send a message to a peer."""
        return self.lane is LaneKind.SEND

    @property
    def is_recv(self) -> bool:
        """True for ops that receive a message from a peer."""
        return self.lane is LaneKind.RECV

    def in_phase(self, phase: OpPhase) -> OpKind | None:
        """Return the kind of the same part in another phase, or None if there is none."""
        return KIND_OF.get((self.part, phase)) if self.part is not None else None


KIND_OF: dict[tuple[OpPart, OpPhase], OpKind] = {
    (kind.part, kind.phase): kind for kind in OpKind if kind.part is not None and kind.phase is not None
}
"""The kind of a part in a phase."""


def where(
    *, role: OpRole | None = None, lane: LaneKind | None = None, phase: OpPhase | None = None, cost: str | None = None
) -> tuple[OpKind, ...]:
    """Return the kinds that have these values in their rows, in the order of the table."""
    wanted = {"role": role, "lane": lane, "phase": phase, "cost": cost}
    given = {column: value for column, value in wanted.items() if value is not None}
    return tuple(kind for kind in OpKind if all(getattr(kind, column) == value for column, value in given.items()))


def of_parts(phase: OpPhase, parts: Iterable[OpPart]) -> tuple[OpKind, ...]:
    """Return the kinds of these parts in a phase, as far as there are any."""
    return tuple(KIND_OF[part, phase] for part in parts if (part, phase) in KIND_OF)


def by_part(phase: OpPhase) -> dict[str, OpKind]:
    """Return the kinds of a phase by the names of their parts, in the order of a forward: `{"attn": ATTN_F, ...}`."""
    return {str(kind.part): kind for kind in of_parts(phase, (part for part in OpPart if part.blocks))}


def column(value: Callable[[OpKind], Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the array `[kind] -> value`."""
    return np.array([value(kind) for kind in OpKind], dtype)


ACTIONS = where(role=OpRole.ACTION)
MESSAGES = where(role=OpRole.MESSAGE)
SENDS, RECEIVES = where(lane=LaneKind.SEND), where(lane=LaneKind.RECV)
EXCHANGES = where(role=OpRole.EXCHANGE)
COPIES = where(role=OpRole.COPY)
REDUCTIONS = where(role=OpRole.REDUCTION)
BUCKET_OPS = (OpKind.REDUCE_SCATTER, OpKind.GATHER_PARAMS)
"""What is done to each bucket in a step that has buckets."""
MOVES_BYTES = tuple(kind for kind in OpKind if kind.size_key or kind.role is OpRole.COPY)
STEP_END = where(role=OpRole.STEP_END)
STEP_ENDS = (
    (),
    *(
        kinds
        for num in range(1, len(STEP_END) + 1)
        for kinds in combinations(STEP_END, num)
        if OpKind.OPTIMIZER in kinds
    ),
)
"""What a step may end with: nothing, or the optimizer and others, in order."""
MEASURED_ONLY = where(role=OpRole.MEASURED)
UPDATE = where(role=OpRole.UPDATE)
BUCKET_MOVES = tuple(kind for kind in UPDATE if kind.lane.communicates)
"""What moves a bucket between devices."""
BUCKET_LEAVES = tuple(kind for kind in BUCKET_MOVES if not kind.is_recv)
BUCKET_COMES = tuple(kind for kind in BUCKET_MOVES if not kind.is_send)
"""Those of them at the source's end, and at the other."""
COMMUNICATION = tuple(lane for lane in LaneKind if lane.communicates)

LAYER_PARTS = tuple(part for part in OpPart if set(part.blocks) & set(LAYERS))
"""The parts of layers, in the order of a forward."""
COMPUTE_PARTS = tuple(part for part in LAYER_PARTS if KIND_OF[part, OpPhase.F].role is OpRole.COMPUTE)
"""Those of them that compute."""
BLOCK_PARTS = {part.blocks: part for part in OpPart if part.blocks and part not in LAYER_PARTS}
"""The part that is a whole block, by the block's letter: E, m, L."""

FORWARD = of_parts(OpPhase.F, LAYER_PARTS)
BACKWARD = of_parts(OpPhase.B, reversed(LAYER_PARTS))
"""The forward and the backward of a layer: each op needs the one before it."""
WEIGHTS = (*of_parts(OpPhase.W, reversed(LAYER_PARTS)), *of_parts(OpPhase.W, BLOCK_PARTS.values()))
"""The wgrads that can be split off their backwards."""
BLOCK_FORWARD = {letter: KIND_OF[part, OpPhase.F] for letter, part in BLOCK_PARTS.items()}
BLOCK_BACKWARD = {letter: KIND_OF[part, OpPhase.B] for letter, part in BLOCK_PARTS.items()}
"""The forward and the backward of a block that is no layer, by its letter."""
RECOMPUTE = {kind: KIND_OF[kind.part, OpPhase.F] for kind in where(phase=OpPhase.R) if kind.part is not None}
"""The recompute of a part, and its forward."""
WEIGHT_OF = {
    kind: KIND_OF[kind.part, OpPhase.I if (kind.part, OpPhase.I) in KIND_OF else OpPhase.B]
    for kind in where(phase=OpPhase.W)
    if kind.part is not None
}
"""A wgrad, and the dgrad that it follows."""
