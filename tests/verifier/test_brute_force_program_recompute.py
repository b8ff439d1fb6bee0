"""The oracle of Programs itself: parts computed again, and stages and micro-batches that save unequally."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.written_blocks import AGAIN, COPIED_AND_RECOMPUTED, MIXED, RECOMPUTED
from tests.support.written_programs import (
    ATTN_F,
    ATTN_W,
    CELLS,
    DENSE,
    EXPERTS,
    MLP_F,
    MLP_W,
    ONE,
    TOGETHER,
    left_out,
    run,
    symptoms,
)
from treadle.ir import Placement
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout

ATTN_R, MLP_R = OpKind.ATTN_R, OpKind.MLP_R

# Labels


@pytest.mark.parametrize("name", ["ra", "rm"])
def test_missing(name: str) -> None:
    assert left_out(AGAIN, RECOMPUTED, name) == {"missing", "wrong data"}


@pytest.mark.parametrize(("kind", "other"), [(ATTN_R, "rm"), (MLP_R, "ra")])
def test_only_what_the_layout_computes_again(kind: OpKind, other: str) -> None:
    one = replace(AGAIN, recomputed=(kind,))
    assert symptoms(one, RECOMPUTED) == {"unknown"}
    assert left_out(one, RECOMPUTED, other) == set()
    assert symptoms(replace(AGAIN, recomputed=()), RECOMPUTED) == {"unknown"}


@pytest.mark.parametrize("kind", ["ATTN_R", "MLP_R"])
def test_parts_that_do_not_exist(kind: str) -> None:
    for place in ("1.0", "-1.0", "0.1", "0.0.1", "0.0.-1"):
        assert symptoms(AGAIN, f"{RECOMPUTED}\n 0 COMPUTE: u={kind}{place}") == {"unknown"}
    assert symptoms(AGAIN, f"{RECOMPUTED}\n 0 EP: u={kind}0.0") == {"unknown"}
    assert symptoms(AGAIN, f"{RECOMPUTED}\n 0 COMPUTE: u={kind}0.0<m") == {"double"}


def test_every_layer_computes_its_parts_again() -> None:
    text = """
        0 COMPUTE: a0=ATTN_F0.0.0 m0=MLP_F0.0.0 a1=ATTN_F0.0.1 m1=MLP_F0.0.1<d1
            r1=ATTN_R0.0.1 n1=MLP_B0.0.1<e1 t1=ATTN_B0.0.1<g1 r0=ATTN_R0.0.0 n0=MLP_B0.0.0 t0=ATTN_B0.0.0
        0 EP: d1=DISPATCH_F0.0.1<a1 c1=COMBINE_F0.0.1<m1 e1=COMBINE_B0.0.1 g1=DISPATCH_B0.0.1<n1
    """
    layout = replace(AGAIN, blocks=("dt",), recomputed=(ATTN_R,))
    assert symptoms(layout, text) == set()
    for name in ("r0", "r1"):
        assert left_out(layout, text, name) == {"missing", "wrong data"}
    # each layer's is its own
    swapped = ("r1=ATTN_R0.0.1 n1", "r0=ATTN_R0.0.0 n1"), ("r0=ATTN_R0.0.0 n0", "r1=ATTN_R0.0.1 n0")
    assert symptoms(layout, text, *swapped) == {"wrong data"}


# Needs


def test_what_is_computed_again_needs_its_forward_alone() -> None:
    # neither the exchange nor the other part
    early = RECOMPUTED.replace("rm=MLP_R0.0<m", "rm=MLP_R0.0<c").replace("ra=ATTN_R0.0<a", "ra=ATTN_R0.0<d")
    assert symptoms(AGAIN, early) == set()
    assert symptoms(AGAIN, RECOMPUTED, ("rm=MLP_R0.0<m", "rm=MLP_R0.0<d")) == {"wrong data"}


def test_a_backward_part_needs_its_own() -> None:
    crossed = ("n=MLP_B0.0<e,rm", "n=MLP_B0.0<e,ra"), ("t=ATTN_B0.0<g,ra", "t=ATTN_B0.0<g,rm")
    assert symptoms(AGAIN, RECOMPUTED, *crossed[:1]) == {"wrong data"}
    assert symptoms(AGAIN, RECOMPUTED, *crossed) == {"wrong data"}


def test_copies_come_back_before_parts_are_computed_again() -> None:
    for old, new in (("rm=MLP_R0.0<on", "rm=MLP_R0.0<m"), ("ra=ATTN_R0.0<on", "ra=ATTN_R0.0<a")):
        assert symptoms(AGAIN, COPIED_AND_RECOMPUTED, (old, new)) == {"wrong data"}
    # ATTN_B has its copy through COMBINE_B
    (note,) = run(AGAIN, COPIED_AND_RECOMPUTED.replace("ra=ATTN_R0.0<on", "ra=ATTN_R0.0<a")).notes
    assert "ATTN_R 0.0 L0) does not wait for" in note
    # an ONLOAD alone is asked for too
    assert left_out(AGAIN, COPIED_AND_RECOMPUTED.replace("<off", "<c"), "off") == {"missing", "wrong data"}


# Memory


FLAT = replace(DENSE, num_mb=2, recomputed=(ATTN_R, MLP_R), saved={ATTN_F: 1, MLP_F: 2, ATTN_R: 10, MLP_R: 20})
ONE_BY_ONE = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 a1=ATTN_F1.0 m1=MLP_F1.0
        M0=MLP_R0.0 n0=MLP_B0.0 A0=ATTN_R0.0 t0=ATTN_B0.0 M1=MLP_R1.0 n1=MLP_B1.0 A1=ATTN_R1.0 t1=ATTN_B1.0
"""


def test_peaks() -> None:
    # both micro-batches keep 3; each part comes back only when the one before it is gone
    assert run(FLAT, ONE_BY_ONE).peak == (3 + 3 + 20,)
    # A0 before n0: 20 and 10
    early = ONE_BY_ONE.replace(" A0=ATTN_R0.0", "").replace("n0=", "A0=ATTN_R0.0 n0=")
    assert run(FLAT, early).peak == (3 + 3 + 30,)
    # A1 before n0 is still there when M1 starts, with the 3 of its own
    carried = ONE_BY_ONE.replace(" A1=ATTN_R1.0", "").replace("n0=", "A1=ATTN_R1.0 n0=")
    assert run(FLAT, carried).peak == (3 + 3 + 20 + 10,)
    # of the first nothing stays, or the second would have more: 3 + 20 of it, and 10 of its own
    late = ONE_BY_ONE.replace(" A1=ATTN_R1.0", "").replace("n1=", "A1=ATTN_R1.0 n1=")
    assert run(replace(FLAT, saved={**FLAT.saved, MLP_F: 0, ATTN_F: 0}), late).peak == (30,)
    assert run(FLAT, late).peak == (3 + 30,)


def test_peaks_until_the_weight_halves() -> None:
    split = replace(FLAT, weights=(MLP_W, ATTN_W))
    text = ONE_BY_ONE.replace("M1=", "{} M1=").replace("t1=ATTN_B1.0", "t1=ATTN_B1.0 {} W1=MLP_W1.0 X1=ATTN_W1.0")
    halves = "W0=MLP_W0.0 X0=ATTN_W0.0"
    # the first has all its 33 when it needs ATTN_R; so has the second, and its halves are done only then
    assert run(split, text.format(halves, "")).peak == (3 + 33,)
    assert run(split, text.format("", halves)).peak == (33 + 33,)
    # of each part of the first half stays, rounded to even: 16; MLP_R brings the second to 23; n1 then gives 11 back
    assert run(replace(split, kept=0.5), text.format("", halves)).peak == (39,)
    assert run(replace(split, kept=0.0), text.format("", halves)).peak == (3 + 3 + 20,)


def test_recomputed_without_saving() -> None:
    nothing = replace(FLAT, saved={ATTN_F: 1, MLP_F: 2})
    assert run(nothing, ONE_BY_ONE).peak == (6,)
    # and what a layout says of parts that it does not compute again is nobody's
    plain = "0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 n0=MLP_B0.0 t0=ATTN_B0.0"
    assert run(replace(FLAT, num_mb=1, recomputed=()), plain).peak == (3,)


COPIED = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 a1=ATTN_F1.0 m1=MLP_F1.0
        M1=MLP_R1.0 n1=MLP_B1.0 A1=ATTN_R1.0 t1=ATTN_B1.0 M0=MLP_R0.0<on n0=MLP_B0.0 A0=ATTN_R0.0 t0=ATTN_B0.0
    0 OUT: off=OFFLOAD0.0<m0
    0 IN: on=ONLOAD0.0<off,{}
"""


def test_copies_are_of_what_the_forward_saved() -> None:
    # while the second micro-batch has 23 the first is away; when M0 starts there are its own 3 and 20
    assert symptoms(FLAT, COPIED.format("t1")) == set()
    assert run(FLAT, COPIED.format("t1")).peak == (3 + 20,)
    # brought back before the second is through: 3 more
    assert run(FLAT, COPIED.format("m1")).peak == (3 + 20 + 3,)
    # a copy does not move what is computed again
    twice = COPIED.format("m1").replace(" M0=MLP_R0.0<on", "").replace("n1=", "M0=MLP_R0.0<on n1=")
    assert run(FLAT, twice).peak == (3 + 20 + 3 + 20,)


def test_dense_layers_compute_their_own_again() -> None:
    both = replace(FLAT, blocks=("d",), dense_saved={MLP_R: 5, ATTN_F: 4})
    # 4 and 2 of each, then 5, later 10
    assert run(both, ONE_BY_ONE).peak == (6 + 4 + 10,)
    assert run(replace(both, blocks=("t",)), ONE_BY_ONE).peak == (26,)


# Stages and micro-batches of unequal size


def test_scales_of_stages() -> None:
    assert run(replace(CELLS, saved={OpKind.F: 10}, stage_scale=(1.5, 0.5)), ONE).peak == (15, 5)


def test_scales_of_micro_batches() -> None:
    alone = replace(CELLS, placement=Placement.loop(1), blocks=("",), num_mb=2, saved={OpKind.F: 10}, mb_scale=(2, 0.5))
    assert run(alone, "0 COMPUTE: f0=F0.0 b0=B0.0 f1=F1.0 b1=B1.0").peak == (20,)
    assert run(alone, "0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0 b1=B1.0").peak == (25,)
    assert run(replace(alone, stage_scale=(3.0,)), "0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0 b1=B1.0").peak == (75,)
    # what is given back is what was taken
    assert run(alone, "0 COMPUTE: f0=F0.0 b0=B0.0 f1=F1.0 i1=I1.0 w1=W1.0").peak == (20,)
    assert run(alone, "0 COMPUTE: f1=F1.0 f0=F0.0 b1=B1.0 b0=B0.0").peak == (25,)


BOTH_WAYS = """
    0 COMPUTE: f0=F0.0 f1=F0.1<rf0 b1=B0.1 b0=B0.0<rb0
    1 COMPUTE: g0=F0.1 g1=F0.0<rf1 c1=B0.0 c0=B0.1<rb1
    0 SEND 1 g0: sf0=SEND_F0.0<f0 sb0=SEND_B0.1<b1
    1 RECV 0 g0: rf1=RECV_F0.0 rb1=RECV_B0.1
    1 SEND 0 g1: sf1=SEND_F0.1<g0 sb1=SEND_B0.0<c1
    0 RECV 1 g1: rf0=RECV_F0.1 rb0=RECV_B0.0
"""


def test_micro_batches_are_numbered_pipe_after_pipe() -> None:
    layout = replace(CELLS, placement=Placement.bidirectional(2), saved={OpKind.F: 100}, mb_scale=(1.0, 2.0))
    assert run(layout, BOTH_WAYS).peak == (300, 300)
    # rank 0 holds stage 0 of the first pipe's and stage 1 of the second's, rank 1 the others
    assert run(replace(layout, stage_scale=(1.0, 0.5)), BOTH_WAYS).peak == (100 + 100, 200 + 50)


@pytest.mark.parametrize(("saved", "scale", "held"), [(1, 0.5, 0), (3, 0.5, 2), (5, 0.5, 2), (5, 0.1, 0), (15, 0.1, 2)])
def test_scales_round_half_to_even(saved: int, scale: float, held: int) -> None:
    assert run(replace(CELLS, saved={OpKind.F: saved}, stage_scale=(scale, 1.0)), ONE).peak == (held, saved)


def test_scales_round_once() -> None:
    # 3 * 0.5 * 0.5, not 2 * 0.5
    once = replace(CELLS, saved={OpKind.F: 3}, stage_scale=(0.5, 1.0), mb_scale=(0.5,))
    assert run(once, ONE).peak == (1, 2)
    # 7 + 2 + 3 eighths, not 1 + 0 + 0
    cells = replace(CELLS, blocks=("Edt", "t"), stage_scale=(0.125, 1.0))
    cells = replace(cells, saved={OpKind.F: 3, OpKind.EMBED_F: 7}, dense_saved={OpKind.F: 2})
    assert run(cells, ONE).peak == (2, 3)
    # but each part of a layer by itself: 3 * 0.5 = 1.5 and 5 * 0.5 = 2.5 make 4
    parts = replace(DENSE, saved={ATTN_F: 3, MLP_F: 5}, stage_scale=(0.5,))
    assert run(parts, "0 COMPUTE: a=ATTN_F0.0 m=MLP_F0.0 n=MLP_B0.0 t=ATTN_B0.0").peak == (4,)


def test_scales_of_layers_and_parts_computed_again() -> None:
    # 0.5 of 1, 2, 10 and 20 in the first micro-batch: 0, 1, 5 and 10
    assert run(replace(FLAT, mb_scale=(0.5, 1.0)), ONE_BY_ONE).peak == (3 + 20,)
    assert run(replace(FLAT, mb_scale=(2.0, 1.0)), ONE_BY_ONE).peak == (6 + 3 + 40,)
    assert run(replace(FLAT, mb_scale=(2.0, 1.0)), COPIED.format("m1")).peak == (6 + 40,)


def test_scales_of_replicas_are_alike() -> None:
    # ATTN_F saves 3 of the second micro-batch twice that
    assert run(replace(EXPERTS, mb_scale=(1.0, 2.0)), TOGETHER).peak == (6, 6)


def test_scales_of_dense_layers() -> None:
    layout: Layout = replace(MIXED, blocks=("d",), weights=(), dense_saved={MLP_F: 9}, stage_scale=(1.5,))
    # 4.5 of ATTN_F's 3 and 13.5 of MLP_F's 9, each to even
    assert run(layout, "0 COMPUTE: a=ATTN_F0.0 m=MLP_F0.0 n=MLP_B0.0 t=ATTN_B0.0").peak == (4 + 14,)
