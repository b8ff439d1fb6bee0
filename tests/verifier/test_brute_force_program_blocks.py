"""The oracle of Programs itself: stages of blocks, MTP, and dense and MoE layers in one stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.written_blocks import (
    APART_BLOCKS,
    DENSE_FIRST,
    LAYERLESS,
    MIXED,
    MTP_LAST,
    MTP_TWICE,
    NO_LAYERS,
    SIZES,
    SOUND_BLOCKS,
    TWO_MTP,
    WITH_MTP,
)
from tests.support.written_programs import CELLS, MLP_W, ONE, left_out, run, symptoms, without_dependency
from treadle.ir import Placement
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout


@pytest.mark.parametrize(("layout", "text"), SOUND_BLOCKS)
def test_clean(layout: Layout, text: str) -> None:
    assert symptoms(layout, text) == set()


@pytest.mark.parametrize(("layout", "text"), APART_BLOCKS)
def test_each_dependency_is_needed(layout: Layout, text: str) -> None:
    # ranks that reduce or clip together wait for each other's gradients too
    alone = text.replace("TIED g2", "TIED").replace("WORLD g3", "WORLD")
    cut = {(reader, gone): outcome.symptoms for reader, gone, outcome in without_dependency(layout, alone)}
    assert {of: found for of, found in cut.items() if found != {"wrong data"}} == {}


# MTP blocks


@pytest.mark.parametrize("name", ["p", "h", "k", "q", "w"])
def test_missing_mtp(name: str) -> None:
    # without MTP_W the last gradient is ATTN_B's
    text = WITH_MTP.replace("<w", "<w,T")
    assert left_out(MTP_LAST, text, name) == ({"missing"} if name == "w" else {"missing", "wrong data"})


@pytest.mark.parametrize("name", ["p0", "p1", "q0", "q1", "w0", "w1"])
def test_missing_mtp_of_two(name: str) -> None:
    assert left_out(TWO_MTP, MTP_TWICE, name) == ({"missing"} if name[0] == "w" else {"missing", "wrong data"})


@pytest.mark.parametrize("name", ["p", "q", "h", "k"])
def test_missing_blocks_of_stages_without_layers(name: str) -> None:
    assert left_out(NO_LAYERS, LAYERLESS, name) == {"missing", "wrong data"}


@pytest.mark.parametrize("kind", ["MTP_F", "MTP_B", "MTP_W"])
def test_mtp_that_does_not_exist(kind: str) -> None:
    for place in ("1.0", "-1.0", "0.1", "0.0.1", "0.0.-1"):
        assert symptoms(MTP_LAST, f"{WITH_MTP}\n 1 COMPUTE: u={kind}{place}") == {"unknown"}
    # nor on a stage that has none, nor on another lane
    assert symptoms(MTP_LAST, f"{WITH_MTP}\n 0 COMPUTE: u={kind}0.0") == {"unknown"}
    assert symptoms(MTP_LAST, f"{WITH_MTP}\n 1 EP: u={kind}0.0") == {"unknown"}
    for rank in (0, 2):
        assert symptoms(NO_LAYERS, f"{LAYERLESS}\n {rank} COMPUTE: u={kind}0.0") == {"unknown"}


def test_mtp_blocks_are_counted_apart_from_layers() -> None:
    # the stage has one layer and two MTP blocks
    assert symptoms(TWO_MTP, f"{MTP_TWICE}\n 0 COMPUTE: u=ATTN_F0.0.1") == {"unknown"}
    assert symptoms(TWO_MTP, f"{MTP_TWICE}\n 0 COMPUTE: u=MTP_F0.0.2") == {"unknown"}
    assert symptoms(TWO_MTP, f"{MTP_TWICE}\n 0 COMPUTE: u=MTP_F0.0.1<p1") == {"double"}
    # two layers and one MTP block
    deep = replace(TWO_MTP, blocks=("ttm",))
    assert symptoms(deep, "0 COMPUTE: u=MTP_F0.0.1") == {"unknown", "missing"}


@pytest.mark.parametrize("kind", ["ATTN_F", "ATTN_B", "HEAD_F", "EMBED_F"])
def test_stages_without_layers_have_none_of_their_ops(kind: str) -> None:
    assert symptoms(NO_LAYERS, f"{LAYERLESS}\n 1 COMPUTE: u={kind}0.0") == {"unknown"}
    copy = f"{LAYERLESS}\n 1 OUT: off=OFFLOAD0.0<p\n 1 IN: on=ONLOAD0.0<off"
    assert symptoms(NO_LAYERS, copy) == {"unknown"}


def test_mtp_with_and_without_its_weight_half() -> None:
    whole = replace(TWO_MTP, weights=())
    assert symptoms(whole, MTP_TWICE) == {"unknown"}
    half = "0 COMPUTE: w{0}=MTP_W0.0.{0}<q{0}"
    alone = MTP_TWICE.replace("w0=MTP_W0.0<", "w0=MTP_W0.0.0<")
    for number in (0, 1):
        alone = alone.replace(half.format(number), "")
    assert symptoms(whole, alone) == set()
    assert symptoms(TWO_MTP, alone) == {"missing"}
    # a weight half of a block that no stage has stands for nothing
    assert symptoms(replace(NO_LAYERS, weights=(OpKind.MTP_W, MLP_W, OpKind.HEAD_W)), LAYERLESS) == {"missing"}
    assert symptoms(replace(NO_LAYERS, weights=(OpKind.MTP_W, MLP_W)), LAYERLESS) == set()


def test_reduce_grad_of_mtp() -> None:
    # MTP_W makes the gradient; where it is not split off MTP_B does
    assert symptoms(MTP_LAST, WITH_MTP, ("<w,T", "<T")) == {"wrong data"}
    assert symptoms(MTP_LAST, WITH_MTP, ("<w,T", "<w")) == {"wrong data"}
    whole = replace(MTP_LAST, weights=(), blocks=("Et", "mL"))
    text = WITH_MTP.replace("1 COMPUTE: A=ATTN_F0.0<rf\n", "\n").replace("p=MTP_F0.0<A", "p=MTP_F0.0<rf")
    text = text.replace("1 COMPUTE: T=ATTN_B0.0<q\n", "\n").replace("sb=SEND_B0.0<T", "sb=SEND_B0.0<q")
    text = text.replace("1 COMPUTE: w=MTP_W0.0<q\n", "\n").replace("r1=REDUCE_GRAD-1.0<w,T", "r1=REDUCE_GRAD-1.0<q")
    assert symptoms(whole, text) == set()
    assert symptoms(whole, text, ("r1=REDUCE_GRAD-1.0<q", "r1=REDUCE_GRAD-1.0<k")) == {"wrong data"}


def test_stages_of_blocks_on_one_rank() -> None:
    # rank 0 holds all stages: the last of each chain feeds the first of the next, without a message
    layout = replace(NO_LAYERS, placement=Placement.v(1, 3), weights=())
    text = """
        0 COMPUTE: a=ATTN_F0.0
        0 COMPUTE: p=MTP_F0.1<a
        0 COMPUTE: h=HEAD_F0.2<p
        0 COMPUTE: k=HEAD_B0.2<h
        0 COMPUTE: q=MTP_B0.1<k
        0 COMPUTE: t=ATTN_B0.0<q
    """
    assert symptoms(layout, text) == set()
    assert all(outcome.symptoms == {"wrong data"} for _, _, outcome in without_dependency(layout, text))


def test_peaks_of_mtp() -> None:
    assert run(MTP_LAST, WITH_MTP).peak == (7 + 3, 3 + 5 + 11)
    assert run(NO_LAYERS, LAYERLESS).peak == (3, 5, 11)
    two = """
        0 COMPUTE: a=ATTN_F0.0 p0=MTP_F0.0 p1=MTP_F0.0.1 h=HEAD_F0.0 k=HEAD_B0.0 q1=MTP_B0.0.1 q0=MTP_B0.0 t=ATTN_B0.0
            {}
            a2=ATTN_F1.0 P0=MTP_F1.0 P1=MTP_F1.0.1 h2=HEAD_F1.0 k2=HEAD_B1.0 Q1=MTP_B1.0.1 Q0=MTP_B1.0 t2=ATTN_B1.0
            {} W1=MTP_W1.0.1 W0=MTP_W1.0
    """
    halves = "w1=MTP_W0.0.1 w0=MTP_W0.0"
    layout = replace(TWO_MTP, num_mb=2)
    assert run(layout, two.format(halves, "")).peak == (24,)
    # the first micro-batch's MTP blocks are held until their weight halves, or half of each, 2.5 rounded to even
    assert run(layout, two.format("", halves)).peak == (24 + 10,)
    assert run(replace(layout, kept=0.5), two.format("", halves)).peak == (24 + 2 + 2,)
    assert run(replace(layout, kept=0.0), two.format("", halves)).peak == (24,)


# Dense and MoE layers in one stage


@pytest.mark.parametrize(
    "op", ["EP: u=COUNTS", "HOST: u=HOST", "EP: u=DISPATCH_F", "EP: u=COMBINE_F", "EP: u=COMBINE_B", "EP: u=DISPATCH_B"]
)
def test_dense_layers_have_no_exchanges(op: str) -> None:
    assert symptoms(MIXED, f"{DENSE_FIRST}\n 0 {op}0.0") == {"unknown"}
    # the MoE layer has it, and so twice
    assert "double" in symptoms(MIXED, f"{DENSE_FIRST}\n 0 {op}0.0.1")


@pytest.mark.parametrize("name", ["a0", "m0", "n0", "t0", "w0", "a1", "u1", "v1", "d1", "m1", "c1", "e1", "g1", "w1"])
def test_missing_of_mixed_layers(name: str) -> None:
    found = {"missing"} if name in ("t0", "w0", "w1") else {"missing", "wrong data"}
    assert left_out(MIXED, DENSE_FIRST, name) == found


def test_the_order_of_dense_and_moe() -> None:
    assert symptoms(replace(MIXED, blocks=("td",)), DENSE_FIRST) >= {"unknown", "missing"}


def test_copies_of_a_dense_layer() -> None:
    # its first backward part is MLP_B, its last forward part MLP_F; ATTN_B needs no copy but through MLP_B
    assert symptoms(MIXED, DENSE_FIRST, ("off=OFFLOAD0.0<m0", "off=OFFLOAD0.0<a0")) == {"wrong data"}
    late = ("n0=MLP_B0.0<t1,on", "n0=MLP_B0.0<t1"), ("t0=ATTN_B0.0<n0", "t0=ATTN_B0.0<n0,on")
    assert symptoms(MIXED, DENSE_FIRST, *late) == {"wrong data"}


def test_peaks_of_mixed_layers() -> None:
    # layer 0: 3, as dense_saved has no ATTN_F, and 9; layer 1: 3 + 4 + 2
    assert run(MIXED, DENSE_FIRST).peak == (12 + 9,)
    # while the dense layer is away there are at most the 9 of the other
    away = DENSE_FIRST.replace("on=ONLOAD0.0<off", "on=ONLOAD0.0<t1,off")
    # at 2 ATTN_F of layer 1 starts: 12 + 3; the copy is out at 3, and DISPATCH_F starts at 5
    assert run(MIXED, away).peak == (15,)
    assert run(replace(MIXED, dense_saved={}), away).peak == (9,)
    # W0 gives back what MLP_F saved: 9, and all of it, or the peak of the next micro-batch would show it
    again = replace(MIXED, blocks=("d",), num_mb=2)
    twice = """
        0 COMPUTE: a=ATTN_F0.0 m=MLP_F0.0 n=MLP_B0.0 t=ATTN_B0.0 w=MLP_W0.0
            a1=ATTN_F1.0 m1=MLP_F1.0 n1=MLP_B1.0 t1=ATTN_B1.0 w1=MLP_W1.0
    """
    assert run(again, twice).peak == (12,)
    assert run(again, twice.replace("w=MLP_W0.0", "").replace("w1=", "w=MLP_W0.0 w1=")).peak == (12 + 9,)


# Cells that know their blocks


KNOWN = replace(CELLS, blocks=("Edt", "tmL"), saved={**SIZES, OpKind.F: 3}, dense_saved={OpKind.F: 2})


def test_cells_stand_for_their_blocks() -> None:
    assert symptoms(KNOWN, ONE) == set()
    for op in ("EMBED_F0.0", "EMBED_B0.0", "HEAD_F0.0", "MTP_F0.0", "ATTN_F0.0", "HEAD_W0.0", "F0.0.1"):
        for rank in (0, 1):
            assert symptoms(KNOWN, f"{ONE}\n {rank} COMPUTE: u={op}") == {"unknown"}
    assert symptoms(KNOWN, f"{ONE}\n 0 OUT: off=OFFLOAD0.0\n 0 IN: on=ONLOAD0.0<off") == {"unknown"}
    # nor are weight halves of blocks or recomputed parts asked for
    named = replace(KNOWN, weights=(OpKind.W, OpKind.HEAD_W), recomputed=(OpKind.ATTN_R,))
    assert symptoms(named, ONE) == set()
    assert symptoms(named, f"{ONE}\n 0 COMPUTE: u=ATTN_R0.0") == {"unknown"}


def test_peaks_of_cells_that_know_their_blocks() -> None:
    assert run(KNOWN, ONE).peak == (7 + 2 + 3, 3 + 5 + 11)
    assert run(replace(KNOWN, dense_saved={}), ONE).peak == (7 + 3 + 3, 3 + 5 + 11)
    assert run(replace(KNOWN, blocks=("", "")), ONE).peak == (3, 3)
    assert run(replace(KNOWN, blocks=("E", "L")), ONE).peak == (7, 11)
