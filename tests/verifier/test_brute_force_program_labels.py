"""The oracle of Programs itself: ops that are unknown, missing or double."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.written_programs import (
    CELLS,
    DENSE,
    MOE,
    ONE,
    SOUND,
    TWO_DENSE,
    TWO_LAYERS,
    TWO_WHOLE,
    WHOLE,
    left_out,
    symptoms,
)
from treadle.ir.program import Layout


@pytest.mark.parametrize(("layout", "text"), SOUND)
def test_clean(layout: Layout, text: str) -> None:
    assert symptoms(layout, text) == set()


def test_an_empty_program_misses_all() -> None:
    assert symptoms(CELLS, "0 COMPUTE: \n 1 COMPUTE: ") == {"missing"}


# Labels


@pytest.mark.parametrize("label", ["F1.0", "F-1.0", "F0.1", "F0.-1", "F0.0.1", "F0.0.-1", "ATTN_F0.0", "SEND_F0.0"])
def test_unknown_beside_all_that_must_be_there(label: str) -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0", f"f0=F0.0 u={label}")) == {"unknown"}


def test_unknown_stands_for_nothing() -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0", "f0=F1.0")) == {"unknown", "missing", "wrong data"}


@pytest.mark.parametrize("lane", ["0 EP: u=COUNTS", "0 HOST: u=HOST", "0 EP: u=DISPATCH_F", "0 COMPUTE: u=MLP_W"])
def test_kinds_that_the_layout_does_not_have(lane: str) -> None:
    assert symptoms(DENSE, f"{WHOLE}\n{lane}0.0") == {"unknown"}


@pytest.mark.parametrize("kind", ["F", "B", "I", "W"])
def test_cells_among_layers(kind: str) -> None:
    assert symptoms(DENSE, WHOLE, ("t=ATTN_B0.0", f"u={kind}0.0 t=ATTN_B0.0")) == {"unknown"}


def test_layers_of_the_stage_not_of_the_deepest() -> None:
    layout = replace(TWO_DENSE, blocks=("t", "tt"))
    assert symptoms(layout, TWO_WHOLE, ("m0=MLP_F0.0", "m0=MLP_F0.0 u=MLP_F0.0.1")) >= {"unknown"}


def test_lanes_of_another_kind() -> None:
    assert symptoms(DENSE, WHOLE, ("red=", "u=ATTN_F0.0 red=")) == {"unknown"}
    assert symptoms(MOE, TWO_LAYERS, ("0 OUT", "0 IN")) == {"unknown", "missing", "wrong data"}


def test_an_op_on_another_lane_fills_no_need() -> None:
    edits = (("a=ATTN_F0.0 ", ""), ("0 DP:", "0 HOST: a=ATTN_F0.0\n 0 DP:"), ("m=MLP_F0.0", "m=MLP_F0.0<a"))
    assert symptoms(DENSE, WHOLE, *edits) == {"unknown", "missing", "wrong data"}


def test_sends_to_those_that_read_them() -> None:
    # rank 0 does not feed B0.0 of rank 1: there is no stage after
    edits = (("sf=SEND_F0.0<f0", "sf=SEND_F0.0<f0 u=SEND_B0.0"), ("rf=RECV_F0.0", "rf=RECV_F0.0 v=RECV_B0.0"))
    assert symptoms(CELLS, ONE, *edits) == {"unknown"}
    assert symptoms(CELLS, ONE, ("0 SEND 1", "0 SEND 5")) == {"unknown", "missing"}


# two pipelines of two ranks: rank 2 * pp + d
REPLICAS = """
    0 COMPUTE: f0=F0.0 b0=B0.0<rb
    2 COMPUTE: f1=F0.0<rf b1=B0.0
    1 COMPUTE: F0=F0.0 B0=B0.0<RB
    3 COMPUTE: F1=F0.0<RF B1=B0.0
    0 SEND 2 g0: sf=SEND_F0.0<f0
    2 RECV 0 g0: rf=RECV_F0.0
    2 SEND 0 g1: sb=SEND_B0.0<b1
    0 RECV 2 g1: rb=RECV_B0.0
    1 SEND 3 g2: SF=SEND_F0.0<F0
    3 RECV 1 g2: RF=RECV_F0.0
    3 SEND 1 g3: SB=SEND_B0.0<B1
    1 RECV 3 g3: RB=RECV_B0.0
"""


def test_neighbours_are_in_the_same_replica() -> None:
    layout = replace(CELLS, dp=2)
    assert symptoms(layout, REPLICAS) == set()
    assert symptoms(replace(CELLS, ep=2), REPLICAS) == set()
    crossed = (("0 SEND 2 g0", "0 SEND 3 g0"), ("1 SEND 3 g2", "1 SEND 2 g2"))
    assert symptoms(layout, REPLICAS, *crossed) == {"unknown", "missing"}


def test_a_message_has_layer_0() -> None:
    edits = (("sf=SEND_F0.0", "sf=SEND_F0.0.1"), ("rf=RECV_F0.0", "rf=RECV_F0.0.1"))
    assert symptoms(TWO_DENSE, TWO_WHOLE, *edits) == {"unknown", "missing", "wrong data"}


def test_reduce_grad_has_no_micro_batch() -> None:
    assert symptoms(DENSE, WHOLE, ("REDUCE_GRAD-1.0", "REDUCE_GRAD0.0")) == {"unknown"}
    assert symptoms(DENSE, WHOLE, ("t=ATTN_B0.0", "t=ATTN_B0.0 u=ATTN_F-1.0")) == {"unknown"}


def test_missing_cells() -> None:
    no_forward = (("f0=F0.0 b0=B0.0<f0,rb", "b0=B0.0<rb"), ("sf=SEND_F0.0<f0", "sf=SEND_F0.0"))
    assert symptoms(CELLS, ONE, *no_forward) == {"missing", "wrong data"}
    no_backward = (("b1=B0.0<f1", ""), ("sb=SEND_B0.0<b1", "sb=SEND_B0.0"))
    assert symptoms(CELLS, ONE, *no_backward) == {"missing", "wrong data"}
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "b1=I0.0<f1")) == {"missing"}
    # W needs I, and the message too
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "b1=W0.0<f1")) == {"missing", "wrong data"}


def test_missing_messages() -> None:
    # nobody waits for what is left out, so that nothing hangs
    without = (("1 SEND 0 g1: sb=SEND_B0.0<b1", ""), ("0 RECV 1 g1: rb=RECV_B0.0", ""), ("<f0,rb", "<f0"))
    assert symptoms(CELLS, ONE, *without) == {"missing", "wrong data"}
    assert symptoms(CELLS, ONE, ("1 SEND 0 g1: sb=SEND_B0.0<b1", ""), ("1 g1: rb", "1: rb")) == {"missing"}
    assert symptoms(CELLS, ONE, ("0 SEND 1 g0", "0 SEND 1"), ("1 RECV 0 g0: rf=RECV_F0.0", ""), ("<rf", "")) == {
        "missing",
        "wrong data",
    }


@pytest.mark.parametrize("name", ["a1", "m1", "n1", "t1", "w1", "x1", "d1", "c1", "e1", "g1", "off", "on"])
def test_missing_parts_halves_and_copies(name: str) -> None:
    last_of_all = {"w1", "x1"}
    found = {"missing"} if name in last_of_all else {"missing", "wrong data"}
    assert left_out(MOE, TWO_LAYERS, name) == found


def test_reductions_of_all_or_none() -> None:
    both = (("0 DP: red0=REDUCE_GRAD-1.0<t0", ""), ("1 DP: red1=REDUCE_GRAD-1.0<t1", ""))
    assert symptoms(TWO_DENSE, TWO_WHOLE, both[0]) == {"missing"}
    assert symptoms(TWO_DENSE, TWO_WHOLE, *both) == set()


def test_copies_of_both_kinds_or_none() -> None:
    none = (("0 OUT: off=OFFLOAD0.0.0<c0", ""), ("0 IN: on=ONLOAD0.0.0<off", ""), (",on", ""))
    assert symptoms(MOE, TWO_LAYERS, *none) == set()


@pytest.mark.parametrize(
    "edit",
    [
        ("f0=F0.0", "f0=F0.0 again=F0.0"),
        ("b1=B0.0<f1", "b1=B0.0<f1 again=B0.0<f1"),
        ("b1=B0.0<f1", "b1=B0.0<f1 again=I0.0<f1"),
        ("b1=B0.0<f1", "b1=I0.0<f1 again=W0.0 more=W0.0"),
        ("b1=B0.0<f1", "b1=I0.0<f1 again=W0.0 more=B0.0"),
    ],
)
def test_double_cells(edit: tuple[str, str]) -> None:
    assert symptoms(CELLS, ONE, edit) == {"double"}


def test_double_weight_half_beside_whole() -> None:
    # W needs I, and there is none
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "b1=B0.0<f1 w=W0.0")) == {"double", "wrong data"}


def test_double_others() -> None:
    edits = (("sf=SEND_F0.0<f0", "sf=SEND_F0.0<f0 S=SEND_F0.0<f0"), ("rf=RECV_F0.0", "rf=RECV_F0.0 R=RECV_F0.0"))
    assert symptoms(CELLS, ONE, *edits) == {"double"}
    assert symptoms(DENSE, WHOLE, ("red=REDUCE_GRAD-1.0<t", "red=REDUCE_GRAD-1.0<t R=REDUCE_GRAD-1.0")) == {"double"}
    assert symptoms(MOE, TWO_LAYERS, ("off=OFFLOAD0.0.0<c0", "off=OFFLOAD0.0.0<c0 O=OFFLOAD0.0.0")) == {"double"}
    assert symptoms(MOE, TWO_LAYERS, ("w1=MLP_W0.0.1", "w1=MLP_W0.0.1 W=MLP_W0.0.1")) == {"double"}
