"""What ops take and give back, restated for the brute-force executor.

It was written from "Programs" of docs/reference/semantics.md alone.
"""

from __future__ import annotations

from fractions import Fraction

from tests.support.brute_force_labels import COMPUTES_AGAIN, Name, Part, Rules
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout

FORWARD_OF = {
    OpKind.B: OpKind.F,
    OpKind.I: OpKind.F,
    OpKind.W: OpKind.F,
    OpKind.COMBINE_B: OpKind.COMBINE_F,
    OpKind.DISPATCH_B: OpKind.DISPATCH_F,
    OpKind.MLP_B: OpKind.MLP_F,
    OpKind.MLP_W: OpKind.MLP_F,
    OpKind.ATTN_B: OpKind.ATTN_F,
    OpKind.ATTN_W: OpKind.ATTN_F,
    OpKind.EMBED_B: OpKind.EMBED_F,
    OpKind.MTP_B: OpKind.MTP_F,
    OpKind.MTP_W: OpKind.MTP_F,
    OpKind.HEAD_B: OpKind.HEAD_F,
    OpKind.HEAD_W: OpKind.HEAD_F,
}
"""What a backward op or a weight half gives back was saved by this, and by what computed this again."""

BLOCK_FORWARD = {"E": OpKind.EMBED_F, "m": OpKind.MTP_F, "L": OpKind.HEAD_F}


def exact(number: float) -> Fraction:
    """Through text, for 0.1 to be a tenth."""
    return Fraction(str(number))


class Memory:
    """What known ops take at their start and give back at their end."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._layout: Layout = rules.layout
        self._kept = exact(self._layout.kept)
        self._known: dict[tuple[OpKind, int, int, int], tuple[Fraction, Fraction]] = {}

    def changes(self, name: Name) -> tuple[Fraction, Fraction]:
        """What an op takes, and what it gives back. Ops of the same stage and micro-batch are alike."""
        stage = self._rules.stage(name.rank, name.chunk)
        assert stage is not None
        if name.mb == -1:
            return Fraction(0), Fraction(0)
        mb = self._layout.placement.pipes[name.chunk] * self._layout.num_mb + name.mb
        key = (name.kind, stage, mb, name.layer)
        if key not in self._known:
            self._known[key] = self._taken(*key), self._given(*key)
        return self._known[key]

    def _taken(self, kind: OpKind, stage: int, mb: int, layer: int) -> Fraction:
        if kind == OpKind.ONLOAD:
            return self._of_layer(stage, mb, layer)
        return self._saved((kind, layer), stage, mb)

    def _given(self, kind: OpKind, stage: int, mb: int, layer: int) -> Fraction:
        if kind == OpKind.OFFLOAD:
            return self._of_layer(stage, mb, layer)
        if kind not in FORWARD_OF:
            return Fraction(0)
        savers = [FORWARD_OF[kind], *(again for again, what in COMPUTES_AGAIN.items() if what == FORWARD_OF[kind])]
        each = [self._saved((saver, layer), stage, mb) for saver in savers]
        saved, kept = sum(each, Fraction(0)), sum((Fraction(round(size * self._kept)) for size in each), Fraction(0))
        if kind in (OpKind.W, OpKind.MLP_W, OpKind.ATTN_W, OpKind.MTP_W, OpKind.HEAD_W):
            return kept
        return saved - kept if self._rules.split(kind) else saved

    def _of_layer(self, stage: int, mb: int, layer: int) -> Fraction:
        parts = self._rules.of_stage[stage].layers[layer]
        whole = sum((self._saved(part, stage, mb) for part in parts), Fraction(0))
        if OpKind.OFFLOAD not in self._layout.saved:
            return whole
        out = self._unscaled((OpKind.OFFLOAD, layer), stage) * self._scale(stage, mb)
        return min(whole, Fraction(round(out)))

    def _saved(self, part: Part, stage: int, mb: int) -> Fraction:
        chains = self._rules.of_stage[stage]
        if part not in (*chains.forward, *chains.again):
            return Fraction(0)
        # round() of a Fraction takes halves to even
        return Fraction(round(self._unscaled(part, stage) * self._scale(stage, mb)))

    def _scale(self, stage: int, mb: int) -> Fraction:
        scale = Fraction(1)
        if self._layout.stage_scale:
            scale *= exact(self._layout.stage_scale[stage])
        if self._layout.mb_scale:
            scale *= exact(self._layout.mb_scale[mb])
        return scale

    def _unscaled(self, part: Part, stage: int) -> int:
        kind, layer = part
        row = self._layout.blocks[stage]
        if kind != OpKind.F:
            in_layer = kind not in BLOCK_FORWARD.values()
            letters = [letter for letter in row if letter in "dt"]
            return self._of_kind(kind, dense=in_layer and letters[layer] == "d")
        if not row:
            return self._of_kind(OpKind.F)
        return sum(self._of_kind(BLOCK_FORWARD.get(letter, OpKind.F), dense=letter == "d") for letter in row)

    def _of_kind(self, kind: OpKind, *, dense: bool = False) -> int:
        if dense and kind in self._layout.dense_saved:
            return self._layout.dense_saved[kind]
        return self._layout.saved.get(kind, 0)
