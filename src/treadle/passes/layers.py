"""Schedule -> Program at the grain of layers: what each cell does on its lanes, in order.

A cell's order on its lanes is a template, written down as the field draws it:

    warm-up     compute  attn       mlp
    (F alone)   ep           disp      comb

    steady      ep       comb'   | disp, disp'    | comb
    (F | B)     compute  attn    | mlp', mlp W, mlp | attn' | attn W
                pp                                          | send

    cool-down   ep       comb'      disp'
    (B alone)   compute        mlp'       attn' | mlp W, attn W
                pp                              | send

The embedding comes before the first layer; its backward after the last backward layer, or with the wgrads. MTP blocks
and the head with the loss come after the last layer, their backwards before the first backward layer. Their wgrads run
where compute would stand still: in a lone backward under the first all-to-all, else at the end of the cell.

A recomputed part runs just before its backward, where the all-to-all before it leaves compute idle; with
`early_recompute` one exchange sooner: mlp before the forward's attn, attn before the forward's mlp or before mlp'.

Forward layer i goes with backward layer L-1-i; where a stage is deeper than the other, a surplus of backward layers
runs first and one of forward layers last. Lanes are not joined at the ends of cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from treadle.ir.action import Kind
from treadle.ir.blocks import LAYERS
from treadle.ir.ops import (
    BACKWARD,
    BLOCK_BACKWARD,
    BLOCK_FORWARD,
    EXCHANGES,
    FORWARD,
    WEIGHTS,
    LaneKind,
    OpKind,
    OpPhase,
)
from treadle.ir.program import Ints, Layout
from treadle.ir.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """The blocks of each stage, and the choices that lowering makes about their parts.

    `blocks`: as in a Layout; a stage has at least one. `counts`: token counts are exchanged before a dispatch, and the
    host waits for them; without, dispatches are padded. `split`: the wgrads that run apart from their dgrad.
    `hold_attn_w`: attention's wgrad waits for the next slot, where the all-to-all of a backward leaves compute idle.
    `early_mlp_w`: in a lone backward the experts' wgrad runs during the dispatch, not at the end. `recompute`: the
    parts that are recomputed before their backward, `early_recompute`: one exchange sooner than needed. `saved` and
    `dense_saved` (in `saved_unit`, as in a Layout) and `moved` (bytes) are sizes by kind of op.
    """

    blocks: tuple[str, ...]
    moe: bool = True
    counts: bool = True
    split: tuple[OpKind, ...] = WEIGHTS
    hold_attn_w: bool = False
    early_mlp_w: bool = False
    recompute: tuple[OpKind, ...] = ()
    early_recompute: bool = False
    offload: bool = False
    saved: Mapping[OpKind, int] = field(default_factory=dict)
    dense_saved: Mapping[OpKind, int] = field(default_factory=dict)
    moved: Mapping[OpKind, int] = field(default_factory=dict)
    kept: float = 1.0
    saved_unit: str = "bytes"
    stage_scale: tuple[float, ...] = ()
    mb_scale: tuple[float, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    step_end: tuple[OpKind, ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()

    def layout(self, schedule: Schedule) -> Layout:
        """Make the Layout that the ops' labels refer to, before ties and the end of the step are there."""
        num_stages = schedule.placement.num_stages
        if len(self.blocks) != num_stages:
            raise ValueError(f"blocks are a row for each of {num_stages} stages, got {len(self.blocks)}: {self.blocks}")
        absent = () if self.moe and self.counts else (OpKind.COUNTS, OpKind.HOST) if self.moe else EXCHANGES
        letters = {*LAYERS, *"".join(self.blocks)}
        return Layout(
            placement=schedule.placement,
            num_mb=schedule.microbatches_per_pipe,
            blocks=self.blocks,
            forward=tuple(kind for kind in FORWARD if kind not in absent),
            backward=tuple(kind for kind in BACKWARD if kind not in absent),
            weights=tuple(kind for kind in self.split if letters & set(kind.blocks)),
            recomputed=self.recompute,
            saved=dict(self.saved),
            dense_saved=dict(self.dense_saved),
            kept=self.kept,
            saved_unit=self.saved_unit,
            stage_scale=self.stage_scale,
            mb_scale=self.mb_scale,
        )


class Half(IntEnum):
    """Whose micro-batch a part of a cell works on."""

    FORWARD = 0
    BACKWARD = 1
    CARRIED = 2


class TemplateOp(NamedTuple):
    """One op of a cell's template."""

    kind: OpKind
    layer: int
    half: Half


class CellKind(IntEnum):
    """The kind of a cell; the first four are an action alone."""

    F = Kind.F
    B = Kind.B
    I = Kind.I  # noqa: E741 - the field's own name
    W = Kind.W
    PAIR = 4


class Template(NamedTuple):
    """A cell's parts in order, and for each slot how many compute parts stand before it."""

    parts: tuple[TemplateOp, ...]
    slots: tuple[int, ...]

    def on(self, lane: LaneKind) -> tuple[TemplateOp, ...]:
        """The parts that run on a lane."""
        return tuple(part for part in self.parts if part.kind.lane is lane)


_FIRST = (OpKind.HEAD_B, OpKind.MTP_B, OpKind.EMBED_F)
"""What a wgrad that was held back does not go before: the exchange that it is to hide waits for them."""

# fmt: off
_LONE = {
    (False, False): (
        OpKind.COMBINE_B, OpKind.MLP_R, OpKind.MLP_B, OpKind.DISPATCH_B, OpKind.ATTN_R, OpKind.ATTN_B,
        OpKind.MLP_W, OpKind.ATTN_W,
    ),
    (False, True): (
        OpKind.COMBINE_B, OpKind.MLP_R, OpKind.ATTN_R, OpKind.MLP_B, OpKind.DISPATCH_B, OpKind.ATTN_B,
        OpKind.MLP_W, OpKind.ATTN_W,
    ),
    (True, False): (
        OpKind.COMBINE_B, OpKind.MLP_R, OpKind.MLP_B, OpKind.MLP_W, OpKind.DISPATCH_B, OpKind.ATTN_R, OpKind.ATTN_B,
        OpKind.ATTN_W,
    ),
    (True, True): (
        OpKind.COMBINE_B, OpKind.MLP_R, OpKind.ATTN_R, OpKind.MLP_B, OpKind.MLP_W, OpKind.DISPATCH_B, OpKind.ATTN_B,
        OpKind.ATTN_W,
    ),
}
"""The parts of a lone backward layer in order, by `early_mlp_w` and `early_recompute`."""

_PAIRED = {
    False: (
        OpKind.COMBINE_B, OpKind.ATTN_F, OpKind.COUNTS, OpKind.HOST, OpKind.DISPATCH_F,
        OpKind.MLP_R, OpKind.MLP_B, OpKind.MLP_W, OpKind.DISPATCH_B, OpKind.MLP_F, OpKind.COMBINE_F,
        OpKind.ATTN_R, OpKind.ATTN_B, OpKind.ATTN_W,
    ),
    True: (
        OpKind.COMBINE_B, OpKind.MLP_R, OpKind.ATTN_F, OpKind.COUNTS, OpKind.HOST, OpKind.DISPATCH_F,
        OpKind.MLP_B, OpKind.MLP_W, OpKind.DISPATCH_B, OpKind.ATTN_R, OpKind.MLP_F, OpKind.COMBINE_F,
        OpKind.ATTN_B, OpKind.ATTN_W,
    ),
}
"""The parts of a forward and a backward layer that run overlapped, each all-to-all of one under the compute of the
other, by `early_recompute`."""
# fmt: on

_CARRIED_OUT = TemplateOp(OpKind.ATTN_W, 0, Half.BACKWARD)
"""The wgrad that a cell leaves to the next one: of its backward's last layer, which is the stage's first."""


@cache
def template(cell: CellKind, forward: str, backward: str, shape: ShapeKey, carry_in: bool, carry_out: bool) -> Template:
    """Return the parts of a cell whose forward and whose backward run these rows of blocks.

    A wgrad that was held back in the cell before comes in after the first compute part of this one; one that is
    held back here goes out.
    """
    rows = _layers_of(forward), _layers_of(backward), ""
    parts: list[TemplateOp] = []
    slots: list[int] = []
    held = TemplateOp(OpKind.ATTN_W, 0, Half.CARRIED) if carry_in else None
    computes = counted = 0
    for slot in _slots(cell, forward, backward, shape):
        computes += sum(part.kind.lane is LaneKind.COMPUTE for part in parts[counted:])
        counted = len(parts)
        slots.append(computes)
        for part in slot:
            if not _is_there(part, rows[part.half], shape) or (carry_out and part == _CARRIED_OUT):
                continue
            if held is not None and part.kind.lane is LaneKind.COMPUTE and part.kind not in _FIRST:
                after_first = part.kind is OpKind.ATTN_F
                parts += [part, held] if after_first else [held, part]
                held = None
            elif shape.hold and part.kind is OpKind.ATTN_W and cell in (CellKind.PAIR, CellKind.B):
                held = part
            else:
                parts.append(part)
    if held is not None:
        parts.append(held)
    return Template(tuple(parts), tuple(slots))


class ShapeKey(NamedTuple):
    """The properties of a Shape and its layout that decide a template."""

    kinds: frozenset[OpKind]
    hold: bool
    early: bool
    early_recompute: bool

    @classmethod
    def of(cls, shape: Shape, layout: Layout) -> ShapeKey:
        """Take them."""
        ends = (*BLOCK_FORWARD.values(), *BLOCK_BACKWARD.values())
        kinds = frozenset((*layout.forward, *layout.backward, *layout.weights, *layout.recomputed, *ends))
        return cls(kinds, shape.hold_attn_w, shape.early_mlp_w, shape.early_recompute)


def _layers_of(row: str) -> str:
    """Return the letters of a row's layers."""
    return "".join(block for block in row if block in LAYERS)


def _is_there(part: TemplateOp, layers: str, shape: ShapeKey) -> bool:
    """True if the layout has such an op, and its layer has such a part: a dense one has no exchange."""
    kind = part.kind
    return kind in shape.kinds and (not set(kind.blocks) & set(LAYERS) or layers[part.layer] in kind.blocks)


def _slots(cell: CellKind, forward: str, backward: str, shape: ShapeKey) -> list[list[TemplateOp]]:
    """Return the layers of a cell, one or a pair at a time, with the other blocks in the first and in the last."""
    slots = list(_layers(cell, len(_layers_of(forward)), len(_layers_of(backward)), shape)) or [[]]
    first, last = _besides(cell, forward, backward, OpKind.COMBINE_B in shape.kinds)
    slots[0] = [*first, *slots[0]]
    slots[-1] = [*slots[-1], *last]
    return slots


def _besides(cell: CellKind, forward: str, backward: str, moe: bool) -> tuple[list[TemplateOp], list[TemplateOp]]:
    """Return the ops of embedding, MTP blocks and head that a cell runs before and after its layers."""
    first: list[TemplateOp] = []
    last: list[TemplateOp] = []
    head, mtps = "L" in backward, range(backward.count("m"))
    wgrads = [_b(OpKind.HEAD_W, 0)] * head + [_b(OpKind.MTP_W, at) for at in reversed(mtps)]
    if cell not in (CellKind.W, CellKind.F):
        first += [_b(OpKind.HEAD_B, 0)] * head + [_b(OpKind.MTP_B, at) for at in reversed(mtps)]
    hides = moe and _layers_of(backward).endswith("t")  # the first all-to-all of the backward
    early = cell is CellKind.W or (cell is CellKind.B and hides)
    first += wgrads if early else []
    if cell in (CellKind.F, CellKind.PAIR):
        first += [_f(OpKind.EMBED_F, 0)] * ("E" in forward)
        last += [_f(OpKind.MTP_F, at) for at in range(forward.count("m"))] + [_f(OpKind.HEAD_F, 0)] * ("L" in forward)
    if cell in (CellKind.B, CellKind.W, CellKind.PAIR):
        last += [_b(OpKind.EMBED_B, 0)] * ("E" in backward)
        last += wgrads if not early else []
    return first, last


def _layers(cell: CellKind, forward: int, backward: int, shape: ShapeKey) -> Iterator[list[TemplateOp]]:
    if cell is CellKind.F:
        yield from (_forward(layer) for layer in range(forward))
    elif cell is CellKind.W:
        yield from ([_b(OpKind.MLP_W, layer), _b(OpKind.ATTN_W, layer)] for layer in reversed(range(backward)))
    elif cell is CellKind.PAIR:
        alone, both = max(0, backward - forward), min(forward, backward)
        yield from (_backward(backward - 1 - k, shape, wgrads=True) for k in range(alone))
        yield from (_pair(k, both - 1 - k, shape) for k in range(both))
        yield from (_forward(layer) for layer in range(both, forward))
    else:
        whole = cell is CellKind.B
        yield from (_backward(layer, shape, wgrads=whole) for layer in reversed(range(backward)))


def _f(kind: OpKind, layer: int) -> TemplateOp:
    return TemplateOp(kind, layer, Half.FORWARD)


def _b(kind: OpKind, layer: int) -> TemplateOp:
    return TemplateOp(kind, layer, Half.BACKWARD)


def _forward(layer: int) -> list[TemplateOp]:
    return [_f(kind, layer) for kind in FORWARD]


def _backward(layer: int, shape: ShapeKey, *, wgrads: bool) -> list[TemplateOp]:
    parts = _LONE[shape.early, shape.early_recompute]
    return [_b(kind, layer) for kind in parts if wgrads or kind.phase is not OpPhase.W]


def _pair(fwd: int, bwd: int, shape: ShapeKey) -> list[TemplateOp]:
    return [_f(kind, fwd) if kind.phase is OpPhase.F else _b(kind, bwd) for kind in _PAIRED[shape.early_recompute]]


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a schedule in columns: `mb` and `chunk` by half, `template` into `templates`, `first` a rank."""

    rank: Ints
    mb: Ints
    chunk: Ints
    template: Ints
    templates: tuple[Template, ...]
    kind: Ints
    first: Ints

    @cached_property
    def local(self) -> Ints:
        """The place of each cell in its rank's row."""
        return np.arange(len(self.rank), dtype=np.int32) - self.first[self.rank]

    @classmethod
    def of(cls, schedule: Schedule, shape: Shape, layout: Layout) -> Cells:
        """Cells with the templates they follow; what one cell holds back, the next carries."""
        columns = schedule.columns
        lead = np.flatnonzero(~columns.joined)
        paired = np.zeros(len(columns), bool)
        paired[:-1] = columns.joined[1:]
        paired = paired[lead]
        kind = np.where(paired, CellKind.PAIR, columns.kind[lead]).astype(np.int32)
        second = np.where(paired, lead + 1, lead)
        rank = columns.rank[lead]
        first = np.searchsorted(rank, np.arange(schedule.pp + 1)).astype(np.int32)
        before = np.r_[0, second[:-1]]
        source = np.stack([lead, second, before])
        stage = columns.stage[source[:2]]
        deep = np.array(layout.layers, np.int32)[stage]
        rows = list(dict.fromkeys(layout.blocks))
        row = np.array([rows.index(blocks) for blocks in layout.blocks], np.int32)[stage]
        # What the last backward layer holds back goes to the next cell, unless this one has forward layers left.
        carries = (kind == CellKind.B) | ((kind == CellKind.PAIR) & (deep[0] <= deep[1]))
        carries &= shape.hold_attn_w and OpKind.ATTN_W in shape.split
        carries &= deep[1] > 0
        carries[first[1:] - 1] = False
        carried = np.r_[False, carries[:-1]]
        sizes = len(CellKind), len(rows), len(rows), 2, 2
        code = np.ravel_multi_index((kind, *row, carried.astype(np.int32), carries.astype(np.int32)), sizes)
        distinct, which = np.unique(code, return_inverse=True)
        shape_key = ShapeKey.of(shape, layout)
        templates = tuple(
            template(CellKind(int(k)), rows[f], rows[b], shape_key, bool(i), bool(o))
            for k, f, b, i, o in zip(*np.unravel_index(distinct, sizes), strict=True)
        )
        mb, chunk = columns.mb[source], columns.chunk[source]
        return cls(rank, mb, chunk, which.reshape(-1).astype(np.int32), templates, kind, first)
