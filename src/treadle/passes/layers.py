"""Schedule -> Program at the grain of layers: what each cell does on its lanes, one behind the other.

A cell's order on its lanes is a template, written down as the field draws it:

    warm-up     compute  attn       mlp
    (F alone)   ep           disp      comb

    steady      ep       comb'   | disp, disp'    | comb
    (F | B)     compute  attn    | mlp', mlp W, mlp | attn' | attn W
                pp                                          | send

    cool-down   ep       comb'      disp'
    (B alone)   compute        mlp'       attn' | mlp W, attn W
                pp                              | send

The embedding comes before the first layer; its backward behind the last backward layer, or with the weight halves. The
head with the loss comes behind the last layer, its backward before the first backward layer. The head's weight half
runs where compute would stand still: in a lone backward under the first all-to-all, else at the end of the cell.

Forward layer i goes with backward layer L-1-i; where a stage is deeper than the other, a surplus of backward layers
runs first and one of forward layers last. Lanes are not joined at the ends of cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from treadle.ir.action import Kind
from treadle.ir.dependency import BACKWARD, FORWARD
from treadle.ir.program import EMBEDDING, LANE_OF, Ints, LaneKind, Layout, OpKind
from treadle.ir.schedule import Schedule

_EP_ONLY = (OpKind.COUNTS, OpKind.HOST, OpKind.DISPATCH_F, OpKind.COMBINE_F, OpKind.COMBINE_B, OpKind.DISPATCH_B)


@dataclass(frozen=True)
class Shape:
    """The parts of a chunk, and the choices that lowering makes about them.

    `layers`: of every stage, or one number for each. `counts`: token counts are exchanged before a dispatch, and the
    host waits for them; without, dispatches are padded. `split`: the weight halves that run apart from their backward.
    `hold_attn_w`: attention's weight half waits for the next slot, where the all-to-all of a backward leaves compute
    idle. `early_mlp_w`: in a lone backward the experts' weight half runs during the dispatch, not at the end.
    `embedding`, `head`: does the first stage have one before its layers, and the last one (with the loss) behind them.
    `saved` (in `saved_unit`, as in a Layout) and `moved` (bytes) are sizes by kind of op.
    """

    layers: int | tuple[int, ...] = 1
    moe: bool = True
    counts: bool = True
    embedding: bool = False
    head: bool = False
    split: tuple[OpKind, ...] = (OpKind.MLP_W, OpKind.ATTN_W, OpKind.HEAD_W)
    hold_attn_w: bool = False
    early_mlp_w: bool = False
    offload: bool = False
    saved: Mapping[OpKind, int] = field(default_factory=dict)
    moved: Mapping[OpKind, int] = field(default_factory=dict)
    kept: float = 1.0
    saved_unit: str = "bytes"

    def layout(self, schedule: Schedule) -> Layout:
        """Make the Layout that the ops' labels refer to."""
        num_stages = schedule.placement.num_stages
        layers = self.layers if isinstance(self.layers, tuple) else (self.layers,) * num_stages
        if len(layers) != num_stages or min(layers) < 1:
            raise ValueError(f"layers are one number from 1, or one for each of {num_stages} stages, got {self.layers}")
        absent = () if self.moe and self.counts else (OpKind.COUNTS, OpKind.HOST) if self.moe else _EP_ONLY
        return Layout(
            placement=schedule.placement,
            num_mb=schedule.microbatches_per_pipe,
            layers=layers,
            forward=tuple(kind for kind in FORWARD if kind not in absent),
            backward=tuple(kind for kind in BACKWARD if kind not in absent),
            weights=tuple(kind for kind in self.split if self.head or kind is not OpKind.HEAD_W),
            saved=dict(self.saved),
            kept=self.kept,
            embedding=self.embedding,
            head=self.head,
            saved_unit=self.saved_unit,
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
        return tuple(part for part in self.parts if LANE_OF[part.kind] is lane)


class Span(NamedTuple):
    """The part of a stage that a half of a cell runs: its layers, and the ends of the model that it has."""

    layers: int
    embedding: bool = False
    head: bool = False


_FIRST = (OpKind.HEAD_B, OpKind.EMBED_F)
"""What a weight half that was held back does not go before: the exchange that it is to hide waits for them."""

_CARRIED_OUT = TemplateOp(OpKind.ATTN_W, 0, Half.BACKWARD)
"""The weight half that a cell leaves to the next one: of its backward's last layer, which is the stage's first."""


@cache
def template(
    cell: CellKind, forward: Span, backward: Span, shape: ShapeKey, carry_in: bool, carry_out: bool
) -> Template:
    """The parts of a cell whose forward and whose backward run these spans.

    A weight half that was held back in the cell before comes in after the first compute part of this one; one that is
    held back here goes out.
    """
    present = {*shape.forward, *shape.backward, *shape.weights, *EMBEDDING, OpKind.HEAD_F, OpKind.HEAD_B}
    parts: list[TemplateOp] = []
    slots: list[int] = []
    held = TemplateOp(OpKind.ATTN_W, 0, Half.CARRIED) if carry_in else None
    for slot in _slots(cell, forward, backward, shape):
        slots.append(sum(LANE_OF[part.kind] is LaneKind.COMPUTE for part in parts))
        for part in slot:
            if part.kind not in present or (carry_out and part == _CARRIED_OUT):
                continue
            if held is not None and LANE_OF[part.kind] is LaneKind.COMPUTE and part.kind not in _FIRST:
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

    forward: tuple[OpKind, ...]
    backward: tuple[OpKind, ...]
    weights: tuple[OpKind, ...]
    hold: bool
    early: bool


def _slots(cell: CellKind, forward: Span, backward: Span, shape: ShapeKey) -> list[list[TemplateOp]]:
    """The layers of a cell, one or a pair at a time, with the ends of the model in the first and in the last."""
    slots = list(_layers(cell, forward.layers, backward.layers, shape))
    first, last = _ends(cell, forward, backward, OpKind.COMBINE_B in shape.backward)
    slots[0] = [*first, *slots[0]]
    slots[-1] = [*slots[-1], *last]
    return slots


def _ends(cell: CellKind, forward: Span, backward: Span, exchanges: bool) -> tuple[list[TemplateOp], list[TemplateOp]]:
    """Return the ops of the embedding and the head that a cell runs before and behind its layers."""
    first: list[TemplateOp] = []
    last: list[TemplateOp] = []
    if cell is not CellKind.W and cell is not CellKind.F and backward.head:
        first.append(_b(OpKind.HEAD_B, 0))
    if backward.head and (cell is CellKind.W or (cell is CellKind.B and exchanges)):
        first.append(_b(OpKind.HEAD_W, 0))
    if cell in (CellKind.F, CellKind.PAIR):
        first += [_f(OpKind.EMBED_F, 0)] * forward.embedding
        last += [_f(OpKind.HEAD_F, 0)] * forward.head
    if cell in (CellKind.B, CellKind.W, CellKind.PAIR):
        last += [_b(OpKind.EMBED_B, 0)] * backward.embedding
    if backward.head and (cell is CellKind.PAIR or (cell is CellKind.B and not exchanges)):
        last.append(_b(OpKind.HEAD_W, 0))
    return first, last


def _layers(cell: CellKind, forward: int, backward: int, shape: ShapeKey) -> Iterator[list[TemplateOp]]:
    if cell is CellKind.F:
        yield from (_forward(layer) for layer in range(forward))
    elif cell is CellKind.W:
        yield from ([_b(OpKind.MLP_W, layer), _b(OpKind.ATTN_W, layer)] for layer in reversed(range(backward)))
    elif cell is CellKind.PAIR:
        alone, both = max(0, backward - forward), min(forward, backward)
        yield from (_backward(backward - 1 - k, shape, halves=True) for k in range(alone))
        yield from (_pair(k, both - 1 - k) for k in range(both))
        yield from (_forward(layer) for layer in range(both, forward))
    else:
        whole = cell is CellKind.B
        yield from (_backward(layer, shape, halves=whole) for layer in reversed(range(backward)))


def _f(kind: OpKind, layer: int) -> TemplateOp:
    return TemplateOp(kind, layer, Half.FORWARD)


def _b(kind: OpKind, layer: int) -> TemplateOp:
    return TemplateOp(kind, layer, Half.BACKWARD)


def _forward(layer: int) -> list[TemplateOp]:
    return [_f(kind, layer) for kind in FORWARD]


def _backward(layer: int, shape: ShapeKey, *, halves: bool) -> list[TemplateOp]:
    comb, mlp, disp, attn = (_b(kind, layer) for kind in BACKWARD)
    mlp_w, attn_w = ([_b(kind, layer)] if halves else [] for kind in (OpKind.MLP_W, OpKind.ATTN_W))
    if shape.early:
        return [comb, mlp, *mlp_w, disp, attn, *attn_w]
    return [comb, mlp, disp, attn, *mlp_w, *attn_w]


def _pair(fwd: int, bwd: int) -> list[TemplateOp]:
    """Each all-to-all of one micro-batch under the compute of the other."""
    attn, counts, host, disp, mlp, comb = (_f(kind, fwd) for kind in FORWARD)
    comb_b, mlp_b, disp_b, attn_b = (_b(kind, bwd) for kind in BACKWARD)
    mlp_w, attn_w = _b(OpKind.MLP_W, bwd), _b(OpKind.ATTN_W, bwd)
    return [comb_b, attn, counts, host, disp, mlp_b, mlp_w, disp_b, mlp, comb, attn_b, attn_w]


def _span(column: Ints) -> Span:
    layers, embedding, head = column
    return Span(int(layers), bool(embedding), bool(head))


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
        embeds = (stage == 0) & layout.embedding
        heads = (stage == layout.placement.num_stages - 1) & layout.head
        # What the last backward layer holds back goes to the next cell, unless this one has forward layers left.
        carries = (kind == CellKind.B) | ((kind == CellKind.PAIR) & (deep[0] <= deep[1]))
        carries &= shape.hold_attn_w and OpKind.ATTN_W in shape.split
        carries[first[1:] - 1] = False
        carried = np.r_[False, carries[:-1]]
        keys = np.stack([kind, deep[0], embeds[0], heads[0], deep[1], embeds[1], heads[1], carried, carries])
        distinct, which = np.unique(keys, axis=1, return_inverse=True)
        shape_key = ShapeKey(layout.forward, layout.backward, layout.weights, shape.hold_attn_w, shape.early_mlp_w)
        templates = tuple(
            template(CellKind(int(k)), _span(f), _span(b), shape_key, bool(i), bool(o))
            for k, f, b, (i, o) in zip(distinct[0], distinct[1:4].T, distinct[4:7].T, distinct[7:].T, strict=True)
        )
        mb, chunk = columns.mb[source], columns.chunk[source]
        return cls(rank, mb, chunk, which.reshape(-1).astype(np.int32), templates, kind, first)
