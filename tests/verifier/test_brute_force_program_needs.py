"""The oracle of Programs itself: what each op needs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.brute_force_program import execute
from tests.support.program_mutations import freeze, thaw
from tests.support.written_programs import (
    ALONE,
    CELLS,
    DENSE,
    HALVES,
    MLP_W,
    MOE,
    ONE,
    TURN,
    TURNING,
    TWO_LAYERS,
    WHOLE,
    read,
    symptoms,
)

# Needs


@pytest.mark.parametrize("dep", re.findall(r"(\w+)=\w+-?[\d.]+<(\S+)", TWO_LAYERS), ids=lambda dep: dep[0])
def test_each_dependency_of_two_layers_is_needed(dep: tuple[str, str]) -> None:
    reader, deps = dep
    for gone in deps.split(","):
        program, names = read(MOE, TWO_LAYERS)
        draft = thaw(program)
        op = draft.ops[names.index(reader)]
        op.deps.remove(draft.ops[names.index(gone)])
        assert execute(freeze(draft), [1] * len(names)).symptoms == {"wrong data"}, (reader, gone)


@pytest.mark.parametrize(
    "edit",
    [
        ("off=OFFLOAD0.0.0<c0", "off=OFFLOAD0.0.0<m0"),  # not the last forward part
        ("red=REDUCE_GRAD-1.0<x0", "red=REDUCE_GRAD-1.0<w0"),  # not the last gradient
        ("e0=COMBINE_B0.0.0<t1", "e0=COMBINE_B0.0.0<g1"),  # not the last backward part
        ("a1=ATTN_F0.0.1<c0", "a1=ATTN_F0.0.1<m0"),
    ],
)
def test_waiting_for_the_op_before_the_one_needed(edit: tuple[str, str]) -> None:
    assert symptoms(MOE, TWO_LAYERS, edit) == {"wrong data"}


def test_first_backward_part_needs_its_own_forward() -> None:
    late = (("c1=COMBINE_F0.0.1<m1", ""), ("e1=COMBINE_B0.0.1 ", "e1=COMBINE_B0.0.1 c1=COMBINE_F0.0.1<m1 "))
    assert symptoms(MOE, TWO_LAYERS, *late) == {"wrong data"}


def test_weight_halves_need_their_backward() -> None:
    assert symptoms(MOE, TWO_LAYERS, (" w1=MLP_W0.0.1", ""), ("n1=", "w1=MLP_W0.0.1 n1=")) == {"wrong data"}
    assert symptoms(MOE, TWO_LAYERS, (" x1=ATTN_W0.0.1", ""), ("t1=", "x1=ATTN_W0.0.1 t1=")) == {"wrong data"}
    assert symptoms(CELLS, HALVES, (" w1=W0.0", ""), ("b1=", "w1=W0.0 b1=")) == {"wrong data"}


def test_reduce_grad_of_whole_backward_parts() -> None:
    assert symptoms(DENSE, WHOLE, ("<t", "<n")) == {"wrong data"}
    only_mlp_split = replace(DENSE, weights=(MLP_W,))
    assert symptoms(only_mlp_split, WHOLE, ("t=ATTN_B0.0", "w=MLP_W0.0 t=ATTN_B0.0")) == set()
    assert symptoms(only_mlp_split, WHOLE, ("t=ATTN_B0.0", "w=MLP_W0.0 t=ATTN_B0.0"), ("<t", "<w")) == {"wrong data"}
    assert symptoms(only_mlp_split, WHOLE, ("t=ATTN_B0.0", "t=ATTN_B0.0 w=MLP_W0.0")) == {"wrong data"}


def test_reduce_grad_of_cells() -> None:
    # I makes no weight gradient
    text = "0 COMPUTE: f0=F0.0 b0=B0.0 f1=F1.0 w1=I1.0 z=W1.0\n 0 DP: r=REDUCE_GRAD-1.0<z"
    assert symptoms(ALONE, text) == set()
    assert symptoms(ALONE, text, ("<z", "<w1")) == {"wrong data"}
    early = "0 COMPUTE: f1=F1.0 i1=I1.0 w1=W1.0 f0=F0.0 b0=B0.0\n 0 DP: r=REDUCE_GRAD-1.0<b0"
    assert symptoms(ALONE, early) == set()
    assert symptoms(ALONE, early, ("<b0", "<f0")) == {"wrong data"}


@pytest.mark.parametrize(
    "edit",
    [
        ("f1=F0.0<rf", "f1=F0.0"),
        ("b0=B0.0<f0,rb", "b0=B0.0<f0"),
        ("sf=SEND_F0.0<f0", "sf=SEND_F0.0"),
        ("sb=SEND_B0.0<b1", "sb=SEND_B0.0<f1"),
    ],
)
def test_messages_of_cells_are_needed(edit: tuple[str, str]) -> None:
    assert symptoms(CELLS, ONE, edit) == {"wrong data"}


def test_input_halves_need_what_whole_backwards_do() -> None:
    half = ("b0=B0.0<f0,rb", "b0=I0.0<f0,rb w0=W0.0")
    assert symptoms(CELLS, ONE, half) == set()
    assert symptoms(CELLS, ONE, half, ("<f0,rb", "<f0")) == {"wrong data"}
    assert symptoms(CELLS, HALVES, ("sb=SEND_B0.0<b1", "sb=SEND_B0.0<f1")) == {"wrong data"}


def test_dependencies_that_the_lane_makes_needless() -> None:
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "b1=B0.0"), ("<f0,rb", "<rb")) == set()


def test_stages_on_the_same_rank() -> None:
    assert symptoms(TURN, TURNING, (" f2=F0.1", ""), ("f1=F0.0<rf1", "f2=F0.1 f1=F0.0<rf1")) == {"wrong data"}
    assert symptoms(TURN, TURNING, (" b1=B0.0", ""), ("b2=B0.1<rb2", "b1=B0.0 b2=B0.1<rb2")) == {"wrong data"}


def test_the_lower_index_of_whole_and_half_is_needed() -> None:
    # B1 waits for the first of B2 and I2 only
    assert symptoms(TURN, TURNING, ("b1=B0.0", "b1=B0.0 i2=I0.1")) == {"double"}
    assert symptoms(TURN, TURNING, (" b1=B0.0", ""), ("b2=B0.1<rb2", "i2=I0.1<rb2 b1=B0.0 b2=B0.1")) == {"double"}
    # so does the send of B1 and I1
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "b1=B0.0<f1 i1=I0.0")) == {"double"}
    assert symptoms(CELLS, ONE, ("b1=B0.0<f1", "i1=I0.0 b1=B0.0"), ("sb=SEND_B0.0<b1", "sb=SEND_B0.0<i1")) == {"double"}


def test_what_is_needed_does_not_exist() -> None:
    edits = (("1 RECV 0 g0: rf=RECV_F0.0", ""), ("<rf", ""), ("0 SEND 1 g0", "0 SEND 1"))
    assert symptoms(CELLS, ONE, *edits) == {"missing", "wrong data"}
