"""The oracle of Programs itself, on Programs small enough to be worked out by hand from ARCHITECTURE.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from tests.support.brute_force_program import Machine, Op, Outcome, Step, execute
from tests.support.program_mutations import MUTATIONS, Draft, Mutation, Queue, Record, freeze, mutate_program, thaw
from treadle.ir import Placement, Schedule
from treadle.ir.program import COLUMNS, LaneKind, Layout, OpKind, Program
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layers import Shape
from treadle.passes.lower import lower_layers
from treadle.passes.mesh import spread
from treadle.schedules import SCHEDULES, generate

ATTN_F, MLP_F, MLP_B, ATTN_B = OpKind.ATTN_F, OpKind.MLP_F, OpKind.MLP_B, OpKind.ATTN_B
MLP_W, ATTN_W, HEAD_W = OpKind.MLP_W, OpKind.ATTN_W, OpKind.HEAD_W
SAVED = {ATTN_F: 3, MLP_F: 2}

OP = re.compile(r"(\w+)=([A-Z_]+)(-?\d+)\.(-?\d+)(?:\.(-?\d+))?(?:!(\d+))?(?:@(\d+))?(\+)?(?:<(\S+))?")
LANE = re.compile(r"(\d+) ([A-Z]+)(?: (\d+))?(?: g(\d+))?")


def read(layout: Layout, text: str) -> tuple[Program, list[str]]:
    """A Program, and the names of its ops.

    A line is a lane, `rank KIND peer g<group>: ops`; one without a colon goes on with it. An op is
    `name=KIND<mb>.<chunk>.<layer>!<size>@<launch>+<dep,dep`, where + says joined and `never` is a dependency on NEVER.
    """
    lanes: list[Queue] = []
    ops: dict[str, Record] = {}
    waits: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, rest = line.rpartition(":")
        if head:
            lanes.append(read_lane(head))
        for word in rest.split():
            found = OP.fullmatch(word)
            assert found is not None, word
            name, kind, mb, chunk, layer, size, launch, joined, deps = found.groups()
            numbers = int(mb), int(chunk), int(layer or 0), -1, int(launch or -1), int(size or 0)
            ops[name] = Record(OpKind[kind], *numbers, bool(joined), [])
            waits[name] = deps.split(",") if deps else []
            lanes[-1].ops.append(ops[name])
    for name, deps in waits.items():
        ops[name].deps = [None if dep == "never" else ops[dep] for dep in deps]
    return freeze(Draft(layout, lanes)), list(ops)


def read_lane(head: str) -> Queue:
    found = LANE.fullmatch(head)
    assert found is not None, head
    rank, kind, peer, group = found.groups(default="-1")
    return Queue(int(rank), LaneKind[kind], int(peer), int(group), [])


def run(layout: Layout, text: str, **dur: int) -> Outcome:
    """Every op takes 1 but those that are named."""
    program, names = read(layout, text)
    outcome = execute(program, [dur.get(name, 1) for name in names])
    assert outcome.clean == (not outcome.symptoms)
    assert (outcome.makespan is None) == (outcome.peak is None) == ("hang" in outcome.symptoms)
    assert {note.partition(":")[0] for note in outcome.notes} == outcome.symptoms
    return outcome


def left_out(layout: Layout, text: str, name: str) -> set[str]:
    """The symptoms of a text without an op, which nobody waits for any more."""
    program, names = read(layout, text)
    draft = thaw(program)
    gone = draft.ops[names.index(name)]
    for lane in draft.lanes:
        lane.ops = [op for op in lane.ops if op is not gone]
    for op in draft.ops:
        op.deps = [dep for dep in op.deps if dep is not gone]
    return set(execute(freeze(draft), [1] * len(names)).symptoms)


def symptoms(layout: Layout, text: str, *edits: tuple[str, str]) -> set[str]:
    """Of the text with each edit made where it applies, which is at one place."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return set(run(layout, text).symptoms)


CELLS = Layout(Placement.loop(2), 1, (0, 0), (OpKind.F,), (OpKind.B,), (OpKind.W,), saved={OpKind.F: 1})
ONE = """
    0 COMPUTE: f0=F0.0 b0=B0.0<f0,rb
    1 COMPUTE: f1=F0.0<rf b1=B0.0<f1
    0 SEND 1 g0: sf=SEND_F0.0<f0
    1 RECV 0 g0: rf=RECV_F0.0
    1 SEND 0 g1: sb=SEND_B0.0<b1
    0 RECV 1 g1: rb=RECV_B0.0
"""
# the same, rank 1's backward in halves
HALVES = ONE.replace("b1=B0.0<f1", "b1=I0.0<f1 w1=W0.0")

ALONE = replace(CELLS, placement=Placement.loop(1), layers=(0,), num_mb=2)
PAIR = "0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0+ b1=B1.0"

TWO_MB = """
    0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0<rb0 b1=B1.0<rb1
    1 COMPUTE: g0=F0.0<rf0 g1=F1.0<rf1 c0=B0.0 c1=B1.0
    0 SEND 1 g0: sf0=SEND_F0.0<f0 sf1=SEND_F1.0<f1
    1 RECV 0 g0: rf0=RECV_F0.0 rf1=RECV_F1.0
    1 SEND 0 g1: sb0=SEND_B0.0<c0 sb1=SEND_B1.0<c1
    0 RECV 1 g1: rb0=RECV_B0.0 rb1=RECV_B1.0
"""

# rank 0 holds stages 0 and 3, rank 1 stages 1 and 2: the turn on rank 1 needs no message
TURN = replace(CELLS, placement=Placement.v(2), layers=(0, 0, 0, 0))
TURNING = """
    0 COMPUTE: f0=F0.0 f3=F0.1<rf3 b3=B0.1 b0=B0.0<rb0
    1 COMPUTE: f1=F0.0<rf1 f2=F0.1 b2=B0.1<rb2 b1=B0.0
    0 SEND 1 g0: sf1=SEND_F0.0<f0 sb2=SEND_B0.1<b3
    1 RECV 0 g0: rf1=RECV_F0.0 rb2=RECV_B0.1
    1 SEND 0 g1: sf3=SEND_F0.1<f2 sb0=SEND_B0.0<b1
    0 RECV 1 g1: rf3=RECV_F0.1 rb0=RECV_B0.0
"""

DENSE = Layout(Placement.loop(1), 1, (1,), (ATTN_F, MLP_F), (MLP_B, ATTN_B), (), saved=SAVED)
WHOLE = """
    0 COMPUTE: a=ATTN_F0.0 m=MLP_F0.0 n=MLP_B0.0 t=ATTN_B0.0
    0 DP: red=REDUCE_GRAD-1.0<t
"""
TWO_DENSE = replace(DENSE, placement=Placement.loop(2), layers=(1, 1))
TWO_WHOLE = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 n0=MLP_B0.0<rb t0=ATTN_B0.0
    1 COMPUTE: a1=ATTN_F0.0<rf m1=MLP_F0.0 n1=MLP_B0.0 t1=ATTN_B0.0
    0 SEND 1 g0: sf=SEND_F0.0<m0
    1 RECV 0 g0: rf=RECV_F0.0
    1 SEND 0 g1: sb=SEND_B0.0<t1
    0 RECV 1 g1: rb=RECV_B0.0
    0 DP: red0=REDUCE_GRAD-1.0<t0
    1 DP: red1=REDUCE_GRAD-1.0<t1
"""

MOE = Layout(
    Placement.loop(1),
    1,
    (2,),
    (ATTN_F, OpKind.DISPATCH_F, MLP_F, OpKind.COMBINE_F),
    (OpKind.COMBINE_B, MLP_B, OpKind.DISPATCH_B, ATTN_B),
    (MLP_W, ATTN_W),
    saved=SAVED,
)
# every one of its dependencies is needed
TWO_LAYERS = """
    0 COMPUTE: a0=ATTN_F0.0.0 m0=MLP_F0.0.0<d0 a1=ATTN_F0.0.1<c0 m1=MLP_F0.0.1<d1
        n1=MLP_B0.0.1<e1 t1=ATTN_B0.0.1<g1 w1=MLP_W0.0.1 x1=ATTN_W0.0.1
        n0=MLP_B0.0.0<e0 t0=ATTN_B0.0.0<g0 w0=MLP_W0.0.0 x0=ATTN_W0.0.0
    0 EP: d0=DISPATCH_F0.0.0<a0 c0=COMBINE_F0.0.0<m0 d1=DISPATCH_F0.0.1<a1 c1=COMBINE_F0.0.1<m1
        e1=COMBINE_B0.0.1 g1=DISPATCH_B0.0.1<n1 e0=COMBINE_B0.0.0<t1,on g0=DISPATCH_B0.0.0<n0
    0 OUT: off=OFFLOAD0.0.0<c0
    0 IN: on=ONLOAD0.0.0<off
    0 DP: red=REDUCE_GRAD-1.0<x0
"""

# two ranks of one expert group, two micro-batches
EXPERTS = Layout(
    Placement.loop(1), 2, (1,), (ATTN_F, OpKind.DISPATCH_F), (OpKind.DISPATCH_B, ATTN_B), (), ep=2, saved=SAVED
)
TOGETHER = """
    0 COMPUTE: a0=ATTN_F0.0 t0=ATTN_B0.0<g0 a1=ATTN_F1.0 t1=ATTN_B1.0<g1
    1 COMPUTE: A0=ATTN_F0.0 T0=ATTN_B0.0<G0 A1=ATTN_F1.0 T1=ATTN_B1.0<G1
    0 EP g0: d0=DISPATCH_F0.0<a0 g0=DISPATCH_B0.0 d1=DISPATCH_F1.0<a1 g1=DISPATCH_B1.0
    1 EP g0: D0=DISPATCH_F0.0<A0 G0=DISPATCH_B0.0 D1=DISPATCH_F1.0<A1 G1=DISPATCH_B1.0
"""

TWO_ENDS = replace(
    TWO_DENSE, weights=(HEAD_W,), saved=SAVED | {OpKind.EMBED_F: 7, OpKind.HEAD_F: 11}, embedding=True, head=True
)
TWO_ENDED = """
    0 COMPUTE: e0=EMBED_F0.0 a0=ATTN_F0.0 m0=MLP_F0.0 n0=MLP_B0.0<rb t0=ATTN_B0.0 g0=EMBED_B0.0
    1 COMPUTE: a1=ATTN_F0.0<rf m1=MLP_F0.0 h1=HEAD_F0.0 k1=HEAD_B0.0 n1=MLP_B0.0 t1=ATTN_B0.0 w1=HEAD_W0.0
    0 SEND 1 g0: sf=SEND_F0.0<m0
    1 RECV 0 g0: rf=RECV_F0.0
    1 SEND 0 g1: sb=SEND_B0.0<t1
    0 RECV 1 g1: rb=RECV_B0.0
    0 DP: red0=REDUCE_GRAD-1.0<g0
    1 DP: red1=REDUCE_GRAD-1.0<w1
"""
ENDS = replace(TWO_ENDS, placement=Placement.loop(1), layers=(1,))
# each op on a lane of its own, so that nothing but dependencies orders them: every one of them is needed
APART = """
    0 COMPUTE: e=EMBED_F0.0
    0 COMPUTE: a=ATTN_F0.0<e
    0 COMPUTE: m=MLP_F0.0<a
    0 COMPUTE: h=HEAD_F0.0<m
    0 COMPUTE: k=HEAD_B0.0<h
    0 COMPUTE: w=HEAD_W0.0<k
    0 COMPUTE: n=MLP_B0.0<k
    0 COMPUTE: t=ATTN_B0.0<n
    0 COMPUTE: g=EMBED_B0.0<t
    0 DP: red=REDUCE_GRAD-1.0<g
"""

# as TURNING: rank 0 holds both the first stage and the last
TURN_ENDS = replace(
    TWO_ENDS, placement=Placement.v(2), layers=(1, 1, 1, 1), forward=(ATTN_F,), backward=(ATTN_B,), weights=()
)
TURNING_ENDED = """
    0 COMPUTE: e=EMBED_F0.0 f0=ATTN_F0.0 f3=ATTN_F0.1<rf3 h=HEAD_F0.1 k=HEAD_B0.1 b3=ATTN_B0.1
        b0=ATTN_B0.0<rb0 g=EMBED_B0.0
    1 COMPUTE: f1=ATTN_F0.0<rf1 f2=ATTN_F0.1 b2=ATTN_B0.1<rb2 b1=ATTN_B0.0
    0 SEND 1 g0: sf1=SEND_F0.0<f0 sb2=SEND_B0.1<b3
    1 RECV 0 g0: rf1=RECV_F0.0 rb2=RECV_B0.1
    1 SEND 0 g1: sf3=SEND_F0.1<f2 sb0=SEND_B0.0<b1
    0 RECV 1 g1: rf3=RECV_F0.1 rb0=RECV_B0.0
"""

SOUND = [
    (CELLS, ONE),
    (CELLS, HALVES),
    (ALONE, PAIR),
    (TURN, TURNING),
    (DENSE, WHOLE),
    (TWO_DENSE, TWO_WHOLE),
    (MOE, TWO_LAYERS),
    (EXPERTS, TOGETHER),
    (TWO_ENDS, TWO_ENDED),
    (ENDS, APART),
    (TURN_ENDS, TURNING_ENDED),
]


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
    layout = replace(TWO_DENSE, layers=(1, 2))
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


# Execution


def test_times() -> None:
    outcome = run(CELLS, ONE, f0=2, sf=3, rf=5, f1=7, b1=11, sb=13, rb=1, b0=17)
    # the receive takes longer than its send, the send longer than its receive
    assert outcome.makespan == 2 + 5 + 7 + 11 + 13 + 17


def test_pairs_take_the_longer_of_their_times() -> None:
    assert run(ALONE, PAIR, f0=1, f1=2, b0=5, b1=1).makespan == 7
    assert run(ALONE, PAIR, f0=1, f1=6, b0=5, b1=1).makespan == 8


def test_never() -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0", "f0=F0.0<never")) == {"hang"}


def test_cycles() -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0", "f0=F0.0<f0")) == {"hang"}
    assert symptoms(CELLS, ONE, ("f0=F0.0", "f0=F0.0<b1")) == {"hang"}
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=RECV_F0.0<f1")) == {"hang"}


def test_a_lane_is_in_order() -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0 b0=B0.0<f0,rb", "b0=B0.0<f0,rb f0=F0.0")) == {"hang"}


def test_pairs_that_need_each_other() -> None:
    assert symptoms(ALONE, PAIR.replace("f1=F1.0 b0=B0.0+ b1=B1.0", "b0=B0.0 f1=F1.0 b1=B1.0+")) == {"wrong data"}
    assert symptoms(ALONE, PAIR.replace("f1=F1.0 b0=B0.0+ b1=B1.0", "b0=B0.0 f1=F1.0 b1=B1.0+<f1")) == {"hang"}


def test_what_waits_for_a_half_waits_for_its_pair() -> None:
    text = "0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0+ b1=B1.0\n 0 OUT: o=OFFLOAD0.0<f0,b0\n 0 IN: i=ONLOAD0.0<o"
    assert run(ALONE, text, b0=1, f1=9).makespan == 1 + 9 + 1 + 1


def test_joined_with_nothing_before_it_is_alone() -> None:
    assert symptoms(ALONE, PAIR, ("f0=F0.0", "f0=F0.0+")) == set()


def test_three_joined() -> None:
    text = "0 COMPUTE: f0=F0.0 f1=F1.0 b0=B0.0+ b1=B1.0+"
    assert symptoms(ALONE, text) == {"wrong data"}
    assert run(ALONE, text, f0=1, f1=2, b0=3, b1=4).makespan == 5


def test_joined_receives_of_sends_apart() -> None:
    two = replace(CELLS, num_mb=2)
    joined = ("rf1=RECV_F1.0", "rf1=RECV_F1.0+")
    # the second send comes after the first ended, and yet with it
    assert symptoms(two, TWO_MB, joined) == {"hang"}
    assert symptoms(two, TWO_MB, joined, ("sf1=SEND_F1.0<f1", "sf1=SEND_F1.0+<f1")) == set()


def test_groups_wait_for_all_and_end_together() -> None:
    assert run(EXPERTS, TOGETHER).makespan == 8
    # each of the slow ones holds up both ranks
    assert run(EXPERTS, TOGETHER, a0=5, D0=7, G1=3).makespan == 8 + 4 + 6 + 2


def test_groups_of_different_lengths() -> None:
    assert symptoms(EXPERTS, TOGETHER, (" g1=DISPATCH_B1.0", ""), ("t1=ATTN_B1.0<g1", "t1=ATTN_B1.0")) == {
        "hang",
        "missing",
        "wrong data",
    }
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=RECV_F0.0 R=RECV_F0.0")) == {"hang", "double"}


def test_groups_of_different_sizes() -> None:
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=RECV_F0.0!8")) == {"hang"}
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=RECV_F0.0!8"), ("sf=SEND_F0.0", "sf=SEND_F0.0!8")) == set()
    assert symptoms(EXPERTS, TOGETHER, ("G1=DISPATCH_B1.0", "G1=DISPATCH_B1.0!1")) == {"hang"}


def test_groups_of_different_kinds() -> None:
    # the labels are the same but for the kind; and rank 1's backward comes before its forward
    swapped = TOGETHER.replace("D0=DISPATCH_F0.0<A0 G0=DISPATCH_B0.0", "G0=DISPATCH_B0.0 D0=DISPATCH_F0.0<A0")
    outcome = run(EXPERTS, swapped)
    assert outcome.symptoms == {"hang", "wrong data"}
    assert sum("it differs" in note for note in outcome.notes) == 2


def test_sends_and_receives_on_other_lanes() -> None:
    # no channel: so their labels are of stages, and these are not the same
    assert symptoms(CELLS, ONE, ("1 RECV 0", "1 EP")) == {"hang", "unknown", "missing", "wrong data"}
    # two sends are of one kind
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=SEND_F0.0")) == {"unknown", "missing", "wrong data"}
    assert symptoms(CELLS, ONE, ("rf=RECV_F0.0", "rf=SEND_B0.0")) == {"hang", "unknown", "missing", "wrong data"}


# Data


def test_crossed_messages() -> None:
    crossed = ("rf1=RECV_F0.0 rb2=RECV_B0.1", "rb2=RECV_B0.1 rf1=RECV_F0.0")
    assert symptoms(TURN, TURNING, crossed) == {"hang", "wrong data"}


def test_crossed_messages_that_do_not_hang() -> None:
    # two micro-batches: rank 1 stores each as the other
    two = replace(CELLS, num_mb=2)
    assert symptoms(two, TWO_MB) == set()
    assert symptoms(two, TWO_MB, ("rf0=RECV_F0.0 rf1=RECV_F1.0", "rf1=RECV_F1.0 rf0=RECV_F0.0")) == {"wrong data"}


@pytest.mark.parametrize("label", ["F1.0", "F0.1", "B0.0"])
def test_labels_of_messages(label: str) -> None:
    def together(*edits: tuple[str, str]) -> bool:
        text = ONE
        for old, new in edits:
            text = text.replace(old, new)
        return not any(" together with " in note for note in run(CELLS, text).notes)

    assert not together(("RECV_F0.0", f"RECV_{label}"))
    assert together(("RECV_F0.0", f"RECV_{label}"), ("SEND_F0.0", f"SEND_{label}"))


def test_crossed_collectives() -> None:
    # rank 1 takes the micro-batches in the other order, and that soundly by itself
    crossed = """
        0 COMPUTE: a0=ATTN_F0.0 t0=ATTN_B0.0<g0 a1=ATTN_F1.0 t1=ATTN_B1.0<g1
        1 COMPUTE: A1=ATTN_F1.0 T1=ATTN_B1.0<G1 A0=ATTN_F0.0 T0=ATTN_B0.0<G0
        0 EP g0: d0=DISPATCH_F0.0<a0 g0=DISPATCH_B0.0 d1=DISPATCH_F1.0<a1 g1=DISPATCH_B1.0
        1 EP g0: D1=DISPATCH_F1.0<A1 G1=DISPATCH_B1.0 D0=DISPATCH_F0.0<A0 G0=DISPATCH_B0.0
    """
    assert symptoms(EXPERTS, crossed) == {"wrong data"}
    assert symptoms(EXPERTS, crossed.replace(" g0:", ":")) == set()


def test_collectives_of_different_layers() -> None:
    layout = replace(EXPERTS, num_mb=1, layers=(2,), forward=(OpKind.DISPATCH_F,), backward=(OpKind.DISPATCH_B,))
    lane = "DISPATCH_F0.0.0 {0}1=DISPATCH_F0.0.1 {0}2=DISPATCH_B0.0.1 {0}3=DISPATCH_B0.0.0"
    same = f"0 EP g0: a0={lane.format('a')}\n 1 EP g0: b0={lane.format('b')}"
    assert symptoms(layout, same) == set()
    turned = same.replace("b1=DISPATCH_F0.0.1", "b1=DISPATCH_F0.0.0").replace(
        "b0=DISPATCH_F0.0.0", "b0=DISPATCH_F0.0.1"
    )
    outcome = run(layout, turned)
    assert outcome.symptoms == {"wrong data"}
    assert sum("together" in note for note in outcome.notes) == 2


BOTH_ENDS = Layout(Placement.bidirectional(2), 1, (0, 0), (OpKind.F,), (OpKind.B,), (OpKind.W,), saved={OpKind.F: 1})
TWO_PIPES = """
    0 COMPUTE: f0=F0.0 f1=F0.1<rf0 b1=B0.1 b0=B0.0<rb0
    1 COMPUTE: g0=F0.1 g1=F0.0<rf1 c1=B0.0 c0=B0.1<rb1
    0 SEND 1 g0: sf0=SEND_F0.0<f0 sb0=SEND_B0.1<b1
    1 RECV 0 g0: rf1=RECV_F0.0 rb1=RECV_B0.1
    1 SEND 0 g1: sf1=SEND_F0.1<g0 sb1=SEND_B0.0<c1
    0 RECV 1 g1: rf0=RECV_F0.1 rb0=RECV_B0.0
    0 DP g2: r0=REDUCE_GRAD-1.0<b0 r1=REDUCE_GRAD-1.1<b1
    1 DP g2: R0=REDUCE_GRAD-1.1<c0 R1=REDUCE_GRAD-1.0<c1
"""


def test_collectives_are_of_the_same_stage_not_chunk() -> None:
    # chunk 0 of rank 0 and chunk 1 of rank 1 are both stage 0
    assert symptoms(BOTH_ENDS, TWO_PIPES) == set()
    same_chunk = ("R0=REDUCE_GRAD-1.1<c0 R1=REDUCE_GRAD-1.0<c1", "R0=REDUCE_GRAD-1.0<c1 R1=REDUCE_GRAD-1.1<c0")
    assert symptoms(BOTH_ENDS, TWO_PIPES, same_chunk) == {"wrong data"}


def test_an_unknown_chunk_is_no_stage() -> None:
    assert symptoms(BOTH_ENDS, TWO_PIPES, ("r1=REDUCE_GRAD-1.1", "r1=REDUCE_GRAD-1.5")) == {
        "unknown",
        "missing",
        "wrong data",
    }
    both = (("r1=REDUCE_GRAD-1.1", "r1=REDUCE_GRAD-1.5"), ("R1=REDUCE_GRAD-1.0", "R1=REDUCE_GRAD-1.6"))
    assert symptoms(BOTH_ENDS, TWO_PIPES, *both) == {"unknown", "missing"}


def test_what_goes_together_need_not_have_ended() -> None:
    # the second rank's ATTN_B waits for the first's DISPATCH_B: that ends with its own
    assert symptoms(EXPERTS, TOGETHER, ("T0=ATTN_B0.0<G0", "T0=ATTN_B0.0<g0")) == set()
    # but a pair starts with its half
    assert symptoms(ALONE, "0 COMPUTE: f0=F0.0 b0=B0.0+ f1=F1.0 b1=B1.0") == {"wrong data"}


def test_what_comes_in_time_by_chance_does_not_count() -> None:
    assert run(CELLS, ONE.replace("<f0,rb", "<f0"), f0=100).symptoms == {"wrong data"}


def test_data_of_what_hangs_is_judged_too() -> None:
    assert symptoms(CELLS, ONE, ("f0=F0.0", "f0=F0.0<never"), ("f1=F0.0<rf", "f1=F0.0")) == {"hang", "wrong data"}


# Launch order


LAUNCHED = """
    0 COMPUTE: f0=F0.0 b0=B0.0<f0,rb
    1 COMPUTE: f1=F0.0<rf b1=B0.0<f1
    0 SEND 1 g0: sf=SEND_F0.0@0<f0
    1 RECV 0 g0: rf=RECV_F0.0@0
    1 SEND 0 g1: sb=SEND_B0.0@1<b1
    0 RECV 1 g1: rb=RECV_B0.0@1
"""
BACK_FIRST = (("rb=RECV_B0.0@1", "rb=RECV_B0.0@0"), ("sf=SEND_F0.0@0", "sf=SEND_F0.0@1"))


def test_launch_orders() -> None:
    assert symptoms(CELLS, LAUNCHED) == set()
    assert symptoms(CELLS, LAUNCHED, *BACK_FIRST) == {"launch order"}


@pytest.mark.parametrize(
    "edit",
    [
        ("sf=SEND_F0.0@0", "sf=SEND_F0.0"),
        ("sf=SEND_F0.0@0", "sf=SEND_F0.0@1"),
        ("rb=RECV_B0.0@1", "rb=RECV_B0.0@2"),
        ("f0=F0.0", "f0=F0.0@2"),
        ("f0=F0.0", "f0=F0.0@0"),
    ],
)
def test_no_launch_order_at_all(edit: tuple[str, str]) -> None:
    assert symptoms(CELLS, LAUNCHED, edit) == {"launch order"}
    assert symptoms(CELLS, LAUNCHED, edit, ("f1=F0.0<rf", "f1=F0.0<rf,never")) == {"hang", "launch order"}


def test_a_launch_order_of_one_rank_only() -> None:
    without = (("rf=RECV_F0.0@0", "rf=RECV_F0.0"), ("sb=SEND_B0.0@1", "sb=SEND_B0.0"))
    assert symptoms(CELLS, LAUNCHED, *without) == {"launch order"}


def test_launch_orders_of_what_hangs_are_not_judged() -> None:
    assert symptoms(CELLS, LAUNCHED, *BACK_FIRST, ("f1=F0.0<rf", "f1=F0.0<rf,never")) == {"hang"}


def test_launch_orders_leave_times_alone() -> None:
    # the gradients' reduction is launched after the receive it has nothing to do with
    late = LAUNCHED + "0 DP: r0=REDUCE_GRAD-1.0@2<b0\n 1 DP: r1=REDUCE_GRAD-1.0@2<b1"
    assert run(CELLS, late, sb=50).makespan == 4 + 50 + 1 + 1
    assert run(CELLS, late).peak == (1, 1)


# Memory


def test_peaks_of_cells() -> None:
    assert run(CELLS, ONE).peak == (1, 1)
    assert run(ALONE, PAIR).peak == (2,)
    assert run(ALONE, "0 COMPUTE: f0=F0.0 b0=B0.0 f1=F1.0 b1=B1.0").peak == (1,)


def test_peaks_of_halves() -> None:
    late = "0 COMPUTE: f0=F0.0 i0=I0.0 f1=F1.0 w0=W0.0 b1=B1.0"
    layout = replace(ALONE, saved={OpKind.F: 10})
    assert run(layout, late).peak == (20,)
    assert run(replace(layout, kept=0.1), late).peak == (11,)
    assert run(replace(layout, kept=0.0), late).peak == (10,)


SPLIT = replace(DENSE, num_mb=2, weights=(MLP_W, ATTN_W))
LATE = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 n0=MLP_B0.0 t0=ATTN_B0.0
        a1=ATTN_F1.0 m1=MLP_F1.0 w0=MLP_W0.0 x0=ATTN_W0.0 n1=MLP_B1.0 t1=ATTN_B1.0 w1=MLP_W1.0 x1=ATTN_W1.0
"""


def test_peaks_of_layers() -> None:
    assert run(DENSE, WHOLE).peak == (5,)
    assert run(SPLIT, LATE).peak == (10,)
    # 5 - 1 - 1.5 of the first are kept, 5 of the second come: 7.5
    assert run(replace(SPLIT, kept=0.5), LATE).peak == (8,)
    assert run(replace(SPLIT, kept=0.0), LATE).peak == (5,)


def test_peaks_of_parts_with_and_without_a_half() -> None:
    layout = replace(SPLIT, weights=(MLP_W,))
    text = LATE.replace("x0=ATTN_W0.0 ", "").replace("x1=ATTN_W1.0", "")
    # of the first the 3 of ATTN_B are gone, the 2 of MLP_B stay
    assert run(layout, text).peak == (7,)


COPIED = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 a1=ATTN_F1.0 m1=MLP_F1.0 n1=MLP_B1.0 t1=ATTN_B1.0 n0=MLP_B0.0<on t0=ATTN_B0.0
    0 OUT: off=OFFLOAD0.0<m0
    0 IN: on=ONLOAD0.0<off,t1
"""


def test_peaks_of_copies() -> None:
    two = replace(DENSE, num_mb=2)
    # gone at 3: at 2 there are 5 + 3, at 3 these less 5 and 2 more
    assert run(two, COPIED).peak == (8,)
    assert run(two, COPIED, off=9).peak == (10,)
    # back at 3 already
    assert run(two, COPIED.replace("off,t1", "off")).peak == (10,)
    # as the copy is gone when it comes back, giving before taking
    assert run(replace(DENSE, num_mb=1), COPY_AND_BACK).peak == (5,)


COPY_AND_BACK = """
    0 COMPUTE: a0=ATTN_F0.0 m0=MLP_F0.0 n0=MLP_B0.0<on t0=ATTN_B0.0
    0 OUT: off=OFFLOAD0.0<m0
    0 IN: on=ONLOAD0.0<off
"""


def test_peaks_are_of_each_rank() -> None:
    slow = TOGETHER.replace("A1=ATTN_F1.0", "A1=ATTN_F1.0<A0")
    assert run(EXPERTS, slow).peak == (3, 3)
    early = TOGETHER.replace("A0=ATTN_F0.0 T0=ATTN_B0.0<G0 A1=ATTN_F1.0", "A0=ATTN_F0.0 A1=ATTN_F1.0 T0=ATTN_B0.0<G0")
    assert run(EXPERTS, early).peak == (3, 6)


# The embedding and the head


EMBED_LABELS = ["EMBED_F", "EMBED_B"]
HEAD_LABELS = ["HEAD_F", "HEAD_B", "HEAD_W"]
OF_FIRST = ("e0=EMBED_F0.0", "e0=EMBED_F0.0 u={}")
OF_LAST = ("w1=HEAD_W0.0", "w1=HEAD_W0.0 u={}")


def beside(edit: tuple[str, str], label: str) -> tuple[str, str]:
    return edit[0], edit[1].format(label)


@pytest.mark.parametrize(
    ("edit", "kinds"), [(OF_FIRST, HEAD_LABELS), (OF_LAST, EMBED_LABELS)], ids=["head on first", "embedding on last"]
)
def test_ends_on_the_other_stage(edit: tuple[str, str], kinds: list[str]) -> None:
    for kind in kinds:
        assert symptoms(TWO_ENDS, TWO_ENDED, beside(edit, f"{kind}0.0")) == {"unknown"}


def test_ends_on_the_other_chunk_of_their_rank() -> None:
    moved = [("e=EMBED_F0.0", "e=EMBED_F0.1"), ("g=EMBED_B0.0", "g=EMBED_B0.1")]
    moved += [("h=HEAD_F0.1", "h=HEAD_F0.0"), ("k=HEAD_B0.1", "k=HEAD_B0.0")]
    for edit in moved:
        assert symptoms(TURN_ENDS, TURNING_ENDED, edit) >= {"unknown", "missing"}
        added = (edit[0], f"{edit[0]} u={edit[1].partition('=')[2]}")
        assert symptoms(TURN_ENDS, TURNING_ENDED, added) == {"unknown"}


@pytest.mark.parametrize(
    ("edit", "kinds"), [(OF_FIRST, EMBED_LABELS), (OF_LAST, HEAD_LABELS)], ids=["embedding", "head"]
)
@pytest.mark.parametrize("place", ["1.0", "-1.0", "0.1", "0.0.1", "0.0.-1"])
def test_ends_that_do_not_exist(edit: tuple[str, str], kinds: list[str], place: str) -> None:
    for kind in kinds:
        assert symptoms(TWO_ENDS, TWO_ENDED, beside(edit, kind + place)) == {"unknown"}


def test_ends_are_of_no_layer() -> None:
    deep = replace(ENDS, layers=(2,))
    text = """
        0 COMPUTE: e=EMBED_F0.0 a0=ATTN_F0.0 m0=MLP_F0.0 a1=ATTN_F0.0.1 m1=MLP_F0.0.1 h=HEAD_F0.0
            k=HEAD_B0.0 w=HEAD_W0.0 n1=MLP_B0.0.1 t1=ATTN_B0.0.1 n0=MLP_B0.0 t0=ATTN_B0.0 g=EMBED_B0.0
    """
    assert symptoms(deep, text) == set()
    for end in ("EMBED_F0.0", "EMBED_B0.0", "HEAD_F0.0", "HEAD_B0.0", "HEAD_W0.0"):
        # in the second layer there is none, though the stage has that layer
        assert symptoms(deep, text, (end, f"{end} u={end}.1")) == {"unknown"}
    # the head is behind the last layer, the embedding before the first
    early = (" h=HEAD_F0.0", ""), ("a1=ATTN_F0.0.1", "h=HEAD_F0.0 a1=ATTN_F0.0.1")
    assert symptoms(deep, text, *early) == {"wrong data"}
    for part in ("n0=MLP_B0.0", "t0=ATTN_B0.0"):
        assert symptoms(deep, text, (" g=EMBED_B0.0", ""), (part, f"g=EMBED_B0.0 {part}")) == {"wrong data"}
    late = (" k=HEAD_B0.0", ""), ("w=HEAD_W0.0", ""), ("n0=MLP_B0.0", "k=HEAD_B0.0 w=HEAD_W0.0 n0=MLP_B0.0")
    assert symptoms(deep, text, *late) == {"wrong data"}


@pytest.mark.parametrize("kind", EMBED_LABELS + HEAD_LABELS)
def test_ends_on_another_lane(kind: str) -> None:
    assert symptoms(ENDS, APART, ("0 DP:", f"0 HOST: u={kind}0.0\n 0 DP:")) == {"unknown"}


@pytest.mark.parametrize("kind", EMBED_LABELS + HEAD_LABELS)
def test_ends_that_the_layout_does_not_have(kind: str) -> None:
    assert symptoms(DENSE, WHOLE, ("t=ATTN_B0.0", f"t=ATTN_B0.0 u={kind}0.0")) == {"unknown"}
    # nor does a weight half alone make a head
    no_head = replace(DENSE, weights=(HEAD_W,))
    assert symptoms(no_head, WHOLE) == set()
    assert symptoms(no_head, WHOLE, ("t=ATTN_B0.0", f"t=ATTN_B0.0 u={kind}0.0")) == {"unknown"}


def test_one_end_only() -> None:
    embedding = replace(DENSE, embedding=True)
    edits = ("a=ATTN_F0.0", "e=EMBED_F0.0 a=ATTN_F0.0"), ("t=ATTN_B0.0", "t=ATTN_B0.0 g=EMBED_B0.0"), ("<t", "<g")
    assert symptoms(embedding, WHOLE, *edits) == set()
    assert symptoms(replace(DENSE, head=True), WHOLE, *edits) >= {"unknown", "missing"}
    head = replace(DENSE, head=True)
    edit = ("m=MLP_F0.0", "m=MLP_F0.0 h=HEAD_F0.0 k=HEAD_B0.0")
    assert symptoms(head, WHOLE, edit) == set()
    assert symptoms(embedding, WHOLE, edit) >= {"unknown", "missing"}


def test_head_with_and_without_its_weight_half() -> None:
    whole = replace(ENDS, weights=())
    assert symptoms(whole, APART) == {"unknown"}
    assert left_out(whole, APART, "w") == set()
    assert left_out(ENDS, APART, "w") == {"missing"}


@pytest.mark.parametrize("name", ["e0", "g0", "h1", "k1", "w1"])
def test_missing_ends(name: str) -> None:
    # nothing needs EMBED_B and HEAD_W but the reductions; without them these need ATTN_B's gradient, and wait for it
    assert left_out(TWO_ENDS, TWO_ENDED.replace("<g0", "<g0,t0").replace("<w1", "<w1,t1"), name) == (
        {"missing"} if name in ("g0", "w1") else {"missing", "wrong data"}
    )


@pytest.mark.parametrize("name", ["e", "g", "h", "k"])
def test_missing_ends_of_a_rank_that_has_both(name: str) -> None:
    assert left_out(TURN_ENDS, TURNING_ENDED, name) == ({"missing"} if name == "g" else {"missing", "wrong data"})


@pytest.mark.parametrize(
    "end", ["e0=EMBED_F0.0", "g0=EMBED_B0.0", "h1=HEAD_F0.0", "k1=HEAD_B0.0", "w1=HEAD_W0.0"], ids=lambda end: end[3:]
)
def test_double_ends(end: str) -> None:
    again = (
        (f"{end} ", f"{end} again={end[3:]} ") if f"{end} " in TWO_ENDED else (f"{end}\n", f"again={end[3:]} {end}\n")
    )
    assert symptoms(TWO_ENDS, TWO_ENDED, again) == {"double"}


@pytest.mark.parametrize("dep", re.findall(r"(\w+)=(\w+-?[\d.]+)<(\S+)", APART), ids=lambda dep: dep[0])
def test_each_dependency_of_ends_is_needed(dep: tuple[str, str, str]) -> None:
    reader, label, needed = dep
    old = f"{reader}={label}<{needed}"
    found = re.search(rf"\b{needed}=([A-Z_]+)", APART)
    assert found is not None
    outcome = run(ENDS, APART.replace(old, f"{reader}={label}"))
    assert outcome.symptoms == {"wrong data"}
    kind = re.match(r"[A-Z_]+", label)
    assert kind is not None
    expected = re.compile(rf".*\(rank 0 {kind[0]} .* does not wait for .*\(rank 0 {found[1]} .*")
    assert any(expected.fullmatch(note) for note in outcome.notes), outcome.notes


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (("n=MLP_B0.0<k", "n=MLP_B0.0<h"), "MLP_B 0.0 L0) does not wait for op 4 (rank 0 HEAD_B"),
        (("w=HEAD_W0.0<k", "w=HEAD_W0.0<h"), "HEAD_W 0.0 L0) does not wait for op 4 (rank 0 HEAD_B"),
        (("g=EMBED_B0.0<t", "g=EMBED_B0.0<n"), "EMBED_B 0.0 L0) does not wait for op 7 (rank 0 ATTN_B"),
        (("<g", "<t,w"), "REDUCE_GRAD -1.0 L0) does not wait for op 8 (rank 0 EMBED_B"),
    ],
    ids=["MLP_B", "HEAD_W", "EMBED_B", "REDUCE_GRAD"],
)
def test_ends_waiting_for_the_op_before_the_one_needed(edit: tuple[str, str], note: str) -> None:
    assert APART.count(edit[0]) == 1
    (found,) = run(ENDS, APART.replace(*edit)).notes
    assert note in found


def test_last_backward_needs_its_own_forward_besides_the_head() -> None:
    # HEAD_B waits for the layer's forward through HEAD_F; only a HEAD_F that does not wait tells the two needs apart
    early = APART.replace("h=HEAD_F0.0<m", "h=HEAD_F0.0<a")
    head, backward = run(ENDS, early).notes
    assert "HEAD_F 0.0 L0) does not wait for op 2 (rank 0 MLP_F" in head
    assert "MLP_B 0.0 L0) does not wait for op 2 (rank 0 MLP_F" in backward
    assert run(ENDS, early.replace("n=MLP_B0.0<k", "n=MLP_B0.0<k,m")).notes == (head,)


def test_other_stages_need_no_ends() -> None:
    # rank 1's first part has RECV_F and rank 0's backward RECV_B; what is not of their stage is not asked for
    for edit in (("a1=ATTN_F0.0<rf", "a1=ATTN_F0.0"), ("n0=MLP_B0.0<rb", "n0=MLP_B0.0")):
        (note,) = run(TWO_ENDS, TWO_ENDED.replace(*edit)).notes
        assert "RECV_" in note


def test_sends_do_not_wait_for_ends() -> None:
    late = (" w1=HEAD_W0.0", ""), ("0 SEND 1 g0", "1 COMPUTE: w1=HEAD_W0.0<k1\n 0 SEND 1 g0")
    assert symptoms(TWO_ENDS, TWO_ENDED, *late) == set()
    assert symptoms(TWO_ENDS, TWO_ENDED, ("sb=SEND_B0.0<t1", "sb=SEND_B0.0<k1")) == {"wrong data"}
    assert symptoms(TWO_ENDS, TWO_ENDED, ("sf=SEND_F0.0<m0", "sf=SEND_F0.0<e0")) == {"wrong data"}


def lane_last(text: str, lane: str) -> str:
    """Changes only the order of op indices: nothing else orders the lanes."""
    assert text.count(f"{lane}\n") == 1
    return text.replace(f"{lane}\n", "\n") + f"{lane}\n"


def test_reduce_grad_of_ends() -> None:
    embed, head, weight = "0 COMPUTE: g=EMBED_B0.0<t", "0 COMPUTE: k=HEAD_B0.0<h", "0 COMPUTE: w=HEAD_W0.0<k"
    assert symptoms(ENDS, APART, ("<g", "<t")) == {"wrong data"}
    # HEAD_W makes the head's gradient, and HEAD_B then makes none
    assert symptoms(ENDS, lane_last(APART, weight)) == {"wrong data"}
    assert symptoms(ENDS, lane_last(APART, weight), ("<g", "<w")) == set()
    assert symptoms(ENDS, lane_last(APART, head)) == set()
    assert symptoms(ENDS, lane_last(APART, head), ("<g", "<k")) == {"wrong data"}
    # HEAD_B makes it where it is whole, so that the reduction needs no other
    whole = replace(ENDS, weights=())
    text = APART.replace(f"{weight}\n", "\n")
    assert symptoms(whole, text, ("<g", "<k")) == {"wrong data"}
    assert symptoms(whole, lane_last(text, head), ("<g", "<k")) == set()
    assert symptoms(whole, lane_last(lane_last(text, head), embed), ("<g", "<k")) == {"wrong data"}


def test_reduce_grad_of_each_stage() -> None:
    assert symptoms(TWO_ENDS, TWO_ENDED, ("<g0", "<t0")) == {"wrong data"}
    assert symptoms(TWO_ENDS, TWO_ENDED, ("<w1", "<t1")) == {"wrong data"}
    # chunk 0 of rank 0 is the embedding's, chunk 1 the head's
    reductions = "0 DP: r0=REDUCE_GRAD-1.0<g r1=REDUCE_GRAD-1.1<b3\n 1 DP: R0=REDUCE_GRAD-1.0<b1 R1=REDUCE_GRAD-1.1<b2"
    assert symptoms(TURN_ENDS, TURNING_ENDED + reductions) == set()
    assert symptoms(TURN_ENDS, TURNING_ENDED + reductions, ("<g", "<b0")) == {"wrong data"}


# both ranks hold the first stage of one pipeline and the last of the other
BOTH_ENDED = """
    0 COMPUTE: e0=EMBED_F0.0 f0=ATTN_F0.0 f1=ATTN_F0.1<rf0 h0=HEAD_F0.1 k0=HEAD_B0.1 b1=ATTN_B0.1
        b0=ATTN_B0.0<rb0 g0=EMBED_B0.0
    1 COMPUTE: e1=EMBED_F0.1 p0=ATTN_F0.1 p1=ATTN_F0.0<rf1 h1=HEAD_F0.0 k1=HEAD_B0.0 c1=ATTN_B0.0
        c0=ATTN_B0.1<rb1 g1=EMBED_B0.1
    0 SEND 1 g0: sf0=SEND_F0.0<f0 sb0=SEND_B0.1<b1
    1 RECV 0 g0: rf1=RECV_F0.0 rb1=RECV_B0.1
    1 SEND 0 g1: sf1=SEND_F0.1<p0 sb1=SEND_B0.0<c1
    0 RECV 1 g1: rf0=RECV_F0.1 rb0=RECV_B0.0
"""


def test_ends_of_both_pipelines() -> None:
    layout = replace(TURN_ENDS, placement=Placement.bidirectional(2), layers=(1, 1))
    assert symptoms(layout, BOTH_ENDED) == set()
    for name in ("e0", "e1", "h0", "h1", "k0", "k1"):
        assert left_out(layout, BOTH_ENDED, name) == {"missing", "wrong data"}
    assert left_out(layout, BOTH_ENDED, "g0") == left_out(layout, BOTH_ENDED, "g1") == {"missing"}
    assert symptoms(layout, BOTH_ENDED, ("e1=EMBED_F0.1", "e1=EMBED_F0.0")) == {"unknown", "missing", "wrong data"}


CELL_ENDS = replace(CELLS, embedding=True, head=True, saved={OpKind.F: 1, OpKind.EMBED_F: 7, OpKind.HEAD_F: 11})
CELLS_ENDED = """
    0 COMPUTE: e0=EMBED_F0.0 f0=F0.0 b0=B0.0<f0,rb g0=EMBED_B0.0
    1 COMPUTE: f1=F0.0<rf h1=HEAD_F0.0 k1=HEAD_B0.0 b1=B0.0<f1
    0 SEND 1 g0: sf=SEND_F0.0<f0
    1 RECV 0 g0: rf=RECV_F0.0
    1 SEND 0 g1: sb=SEND_B0.0<b1
    0 RECV 1 g1: rb=RECV_B0.0
"""


def test_ends_at_the_grain_of_cells() -> None:
    assert symptoms(CELL_ENDS, CELLS_ENDED) == set()
    assert run(CELL_ENDS, CELLS_ENDED).peak == (8, 12)
    halves = (("b0=B0.0<f0,rb", "b0=I0.0<f0,rb"), ("g0=EMBED_B0.0", "g0=EMBED_B0.0 w0=W0.0"))
    assert symptoms(CELL_ENDS, CELLS_ENDED, *halves) == set()
    assert symptoms(CELL_ENDS, CELLS_ENDED, (" g0=EMBED_B0.0", ""), ("b0=B0", "g0=EMBED_B0.0 b0=B0")) == {"wrong data"}
    # I needs what B needs
    late = (" k1=HEAD_B0.0", ""), ("b1=B0.0<f1", "b1=I0.0<f1 k1=HEAD_B0.0 w1=W0.0")
    assert symptoms(CELL_ENDS, CELLS_ENDED, *late) == {"wrong data"}
    split = replace(CELL_ENDS, weights=(OpKind.W, HEAD_W))
    assert symptoms(split, CELLS_ENDED) == {"missing"}
    assert symptoms(split, CELLS_ENDED, ("b1=B0.0<f1", "b1=B0.0<f1 w1=HEAD_W0.0")) == set()
    assert symptoms(CELL_ENDS, CELLS_ENDED, ("b1=B0.0<f1", "b1=B0.0<f1 w1=HEAD_W0.0")) == {"unknown"}


HEAD_LATE = """
    0 COMPUTE: e0=EMBED_F0.0 a0=ATTN_F0.0 m0=MLP_F0.0 h0=HEAD_F0.0 k0=HEAD_B0.0 n0=MLP_B0.0 t0=ATTN_B0.0 g0=EMBED_B0.0
        e1=EMBED_F1.0 a1=ATTN_F1.0 m1=MLP_F1.0 h1=HEAD_F1.0 w0=HEAD_W0.0
        k1=HEAD_B1.0 n1=MLP_B1.0 t1=ATTN_B1.0 g1=EMBED_B1.0 w1=HEAD_W1.0
"""


def test_peaks_of_ends() -> None:
    assert run(TWO_ENDS, TWO_ENDED).peak == (7 + 5, 5 + 11)
    two = replace(ENDS, num_mb=2)
    # of the first micro-batch what HEAD_W waits for is kept, when the second has all 23
    assert run(two, HEAD_LATE).peak == (23 + 11,)
    soon = HEAD_LATE.replace("w0=HEAD_W0.0", "").replace("g0=", "w0=HEAD_W0.0 g0=")
    assert run(two, soon).peak == (23,)
    assert run(replace(two, kept=0.5), HEAD_LATE).peak == (29,)
    assert run(replace(two, kept=0.0), HEAD_LATE).peak == (23,)
    # of a micro-batch that is through, HEAD_W gave back just what HEAD_B had kept
    through = """
        0 COMPUTE: e2=EMBED_F2.0 a2=ATTN_F2.0 m2=MLP_F2.0 h2=HEAD_F2.0
            k2=HEAD_B2.0 w2=HEAD_W2.0 n2=MLP_B2.0 t2=ATTN_B2.0 g2=EMBED_B2.0
    """
    assert run(replace(two, num_mb=3, kept=0.5), through + HEAD_LATE.replace("0 COMPUTE: ", "")).peak == (29,)
    whole = HEAD_LATE.replace("w0=HEAD_W0.0", "").replace("w1=HEAD_W1.0", "")
    for kept in (0.0, 1.0):
        assert run(replace(two, weights=(), kept=kept), whole).peak == (23,)
        # the embedding's has no weight half
        late = whole.replace("g0=EMBED_B0.0", "").replace("g1=", "g0=EMBED_B0.0 g1=")
        assert run(replace(two, weights=(), kept=kept), late).peak == (23 + 7,)


def test_peaks_without_ends_in_the_layout() -> None:
    # bytes that a layout names for ops it does not have are nobody's
    assert run(replace(DENSE, saved=ENDS.saved), WHOLE).peak == (5,)


ENDS_COPIED = """
    0 COMPUTE: e0=EMBED_F0.0 a0=ATTN_F0.0 m0=MLP_F0.0 h0=HEAD_F0.0
        e1=EMBED_F1.0 a1=ATTN_F1.0 m1=MLP_F1.0 h1=HEAD_F1.0 k1=HEAD_B1.0 n1=MLP_B1.0 t1=ATTN_B1.0 g1=EMBED_B1.0
        k0=HEAD_B0.0 n0=MLP_B0.0<on t0=ATTN_B0.0 g0=EMBED_B0.0
    0 OUT: off=OFFLOAD0.0<m0
    0 IN: on=ONLOAD0.0<off,g1
"""


def test_copies_leave_what_ends_saved() -> None:
    two = replace(ENDS, num_mb=2, weights=())
    # of the first micro-batch 5 of 23 are away
    assert run(two, ENDS_COPIED).peak == (23 + 18,)
    assert run(two, ENDS_COPIED, off=9).peak == (23 + 23,)
    # the head's backward needs no copy, its layer's does
    assert symptoms(two, ENDS_COPIED, ("<on", "")) == {"wrong data"}
    assert symptoms(two, ENDS_COPIED, ("0 OUT: off=OFFLOAD0.0<m0", "0 OUT: off=OFFLOAD0.0<h0")) == set()
    assert symptoms(two, ENDS_COPIED, ("0 OUT: off=OFFLOAD0.0<m0", "0 OUT: off=OFFLOAD0.0<a0")) == {"wrong data"}


# Against simpler and slower ways


def behind(machine: Machine, op: Op) -> set[Op]:
    """All ops that a chain leads from to this one, found backwards one by one."""
    together: dict[Step, list[Op]] = {}
    for each in machine.ops:
        together.setdefault(each.step, []).append(each)
    found: set[Op] = set()
    todo = [op]
    while todo:
        for member in together[todo.pop().step]:
            place = member.lane.ops.index(member)
            before = member.lane.ops[place - 1 : place] if place and not member.joined else []
            for pred in (*before, *(dep for dep in member.deps if dep is not None)):
                for reached in together[pred.step]:
                    if reached not in found:
                        found.add(reached)
                        todo.append(reached)
    return found


def together_of(machine: Machine) -> list[set[int]]:
    """For each op the ops it goes together with, grown until nothing changes."""
    place = {op.index: (lane, k) for lane in machine.lanes for k, op in enumerate(lane.ops)}
    pairs = [(op.index, op.index - 1) for op in machine.ops if op.joined and place[op.index][1] > 0]
    for one, other in product(machine.lanes, machine.lanes):
        if one is not other and one.group == other.group != -1:
            pairs += [(a.index, b.index) for a, b in zip(one.ops, other.ops, strict=False)]
    sets = [{op.index} for op in machine.ops]
    changed = True
    while changed:
        changed = False
        for a, b in pairs:
            if sets[a] is not sets[b]:
                union = sets[a] | sets[b]
                for member in union:
                    sets[member] = union
                changed = True
    return sets


def tick(machine: Machine, dur: list[int]) -> int | None:
    """The makespan found by going through time tick by tick and through ops one by one; None if it hangs."""
    sets = together_of(machine)
    ends: dict[int, int] = {}
    time = 0
    while True:
        for op in machine.ops:
            members = [machine.ops[i] for i in sets[op.index]]
            if op.index not in ends and not op.step.never and all(_can_start(m, ends, time) for m in members):
                end = time + max(dur[m.index] for m in members)
                ends.update((m.index, end) for m in members)
        if len(ends) == len(machine.ops):
            return max(ends.values(), default=0)
        if all(end <= time for end in ends.values()):
            return None
        time += 1


def _can_start(op: Op, ends: dict[int, int], time: int) -> bool:
    def ended(other: Op | None) -> bool:
        return other is not None and ends.get(other.index, time + 1) <= time

    place = op.lane.ops.index(op)
    first = place
    while first > 0 and op.lane.ops[first].joined:
        first -= 1
    return all(map(ended, op.lane.ops[:first])) and all(map(ended, op.deps))


def small_programs() -> Iterator[tuple[Random, Program]]:
    random = Random(5)
    shape = Shape(layers=1, moe=True, counts=False, offload=True, saved=SAVED)
    made = [lower_cells(generate(name, pp=2, microbatches=4)) for name in SCHEDULES]
    made += [lower_layers(generate(name, pp=2, microbatches=2), shape, reduce=True) for name in ("1f1b", "zb-h1")]
    made.append(spread(lower_layers(generate("gpipe", pp=1, microbatches=2), shape, reduce=True), ep=2, dp=1))
    made += [
        read(layout, text)[0] for layout, text in ((TWO_ENDS, TWO_ENDED), (ENDS, APART), (TURN_ENDS, TURNING_ENDED))
    ]
    for program in made * 8:
        yield random, mutate_program(program, random)


def test_chains_against_searches() -> None:
    for _, program in small_programs():
        machine = Machine(program, [1] * program.num_ops)
        befores, bit = machine.befores(machine.run()), machine.bits()
        for op in machine.ops:
            found = {other for other in machine.ops if befores[op.step] & bit[other.step]}
            assert found == behind(machine, op)


def test_times_against_ticks() -> None:
    ended = 0
    for random, program in small_programs():
        dur = [random.randint(1, 3) for _ in range(program.num_ops)]
        outcome = execute(program, dur)
        assert outcome.makespan == tick(Machine(program, dur), dur)
        ended += outcome.makespan is not None
    assert ended > 20


# Mutations


def same(one: Program, other: Program) -> bool:
    columns = ((getattr(one, name), getattr(other, name)) for name in COLUMNS)
    return one.layout == other.layout and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in columns)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rebuilding_is_exact(name: str) -> None:
    schedule = generate(name, pp=2, microbatches=4)
    cells = lower_cells(schedule)
    layers = lower_layers(schedule, Shape(layers=2, offload=True, saved=SAVED), reduce=True)
    launched = order_launches(layers, np.ones(layers.num_ops, dtype=np.int64))
    for program in (cells, layers, launched, spread(layers, ep=2, dp=2)):
        assert same(freeze(thaw(program)), program)


def test_mutations_leave_the_program_alone() -> None:
    program = lower_cells(generate("dualpipe", pp=2, microbatches=4))
    copy = freeze(thaw(program))
    for seed in range(50):
        mutate_program(program, Random(seed))
    assert same(program, copy)


def test_a_dependency_on_an_op_that_is_gone_is_on_never() -> None:
    draft = thaw(read(CELLS, ONE)[0])
    del draft.lanes[0].ops[0]
    program = freeze(draft)
    assert program.deps(0)[0] == -1
    assert execute(program, [1] * program.num_ops).symptoms == {"hang", "missing", "wrong data"}


def test_each_mutation_can_do_damage() -> None:
    shape = Shape(layers=2, offload=True, saved=SAVED)
    by_layer = spread(lower_layers(generate("1f1b", pp=2, microbatches=3), shape, reduce=True), ep=2, dp=1)
    made = [by_layer, lower_cells(generate("dualpipe", pp=2, microbatches=4)), read(TWO_ENDS, TWO_ENDED)[0]]
    launched = [order_launches(program, np.ones(program.num_ops, dtype=np.int64)) for program in made]
    for mutation in MUTATIONS:
        assert any(_damages(mutation, program, seed) for seed, program in product(range(20), launched)), mutation


def _damages(mutation: Mutation, program: Program, seed: int) -> bool:
    draft = thaw(program)
    changed = mutation(draft, Random(seed))
    damaged = freeze(draft)
    assert changed or same(program, damaged)
    return not execute(damaged, [1] * damaged.num_ops).clean


def test_damage_is_varied() -> None:
    outcomes = [execute(program, [1] * program.num_ops) for _, program in small_programs()]
    assert 0 < sum(outcome.clean for outcome in outcomes) < len(outcomes) / 2
    seen = frozenset[str]().union(*(outcome.symptoms for outcome in outcomes))
    assert seen == {"hang", "wrong data", "missing", "double", "unknown"}


# Generated Programs


SIZES = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 6), (4, 8)]
BOTH = (MLP_W, ATTN_W)
WITH_HEAD = (MLP_W, ATTN_W, HEAD_W)
MOVED = {OpKind.OFFLOAD: 5, OpKind.DISPATCH_F: 7, OpKind.SEND_F: 3, OpKind.RECV_F: 3}
SHAPES = [
    Shape(layers=1, moe=False, counts=False, split=(), saved=SAVED),
    Shape(layers=2, moe=False, counts=False, split=BOTH, saved=SAVED, kept=0.5),
    Shape(layers=2, moe=True, counts=False, split=(), saved=SAVED, moved=MOVED),
    Shape(layers=1, moe=True, counts=True, split=BOTH, saved=SAVED, moved=MOVED),
    Shape(layers=2, moe=True, counts=True, split=BOTH, hold_attn_w=True, saved=SAVED),
    Shape(layers=1, moe=True, counts=True, split=(MLP_W,), early_mlp_w=True, saved=SAVED),
    Shape(layers=2, moe=True, counts=True, split=BOTH, hold_attn_w=True, early_mlp_w=True, offload=True, saved=SAVED),
    Shape(layers=1, moe=False, counts=False, split=BOTH, offload=True, saved=SAVED, moved=MOVED, kept=0.5),
    Shape(layers=1, moe=False, counts=False, split=(), embedding=True, head=True, saved=ENDS.saved),
    Shape(layers=2, moe=False, counts=False, split=WITH_HEAD, head=True, offload=True, saved=ENDS.saved, kept=0.5),
    Shape(layers=1, moe=True, counts=True, split=WITH_HEAD, embedding=True, head=True, saved=ENDS.saved, moved=MOVED),
]


def sound(program: Program, dur: list[int]) -> Outcome:
    outcome = execute(program, dur)
    assert outcome.clean, outcome.notes[:10]
    return outcome


def launched(program: Program, dur: list[int]) -> Program:
    return order_launches(program, np.array(dur, dtype=np.int64))


def random_dur(program: Program, random: Random) -> list[int]:
    return [random.randint(0, 9) for _ in range(program.num_ops)]


def schedules(name: str) -> Iterator[Schedule]:
    """Of the sizes that there are."""
    for pp, num_mb in SIZES:
        with suppress(ValueError):
            yield generate(name, pp=pp, microbatches=num_mb)


@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_cells(name: str) -> None:
    random = Random(name)
    made = list(schedules(name))
    assert len(made) >= 3
    for schedule in made:
        program = lower_cells(schedule)
        dur = random_dur(program, random)
        assert sound(launched(program, dur), dur) == sound(program, dur)


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_layers(name: str, shape: Shape) -> None:
    random = Random(name)
    for schedule, reduce in product(schedules(name), (False, True)):
        program = lower_layers(schedule, shape, reduce=reduce)
        dur = random_dur(program, random)
        outcome = sound(program, dur)
        assert sound(launched(program, dur), dur) == outcome
        if program.num_ops <= 120:
            _check_spread(program, dur, outcome)


def _check_spread(program: Program, dur: list[int], alone: Outcome) -> None:
    for ep, dp in ((2, 2), (2, 1), (1, 2)):
        mesh = spread(program, ep=ep, dp=dp)
        times = dur * (ep * dp)
        outcome = sound(launched(mesh, times), times)
        assert outcome.makespan == alone.makespan
        assert alone.peak is not None
        assert outcome.peak == tuple(peak for peak in alone.peak for _ in range(ep * dp))
