"""Programs written as text, small enough to be worked out by hand from docs/reference/semantics.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.support.brute_force_program import Outcome, execute
from tests.support.held_verdicts import hold_to_oracle
from tests.support.program_mutations import Draft, Queue, Record, freeze, thaw
from treadle.ir import Placement
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import COLUMNS, Layout, Program

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
    took = [dur.get(name, 1) for name in names]
    outcome = execute(program, took)
    hold_to_oracle(program, np.array(took, np.int64), outcome)
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
    without = freeze(draft)
    outcome = execute(without, [1] * without.num_ops)
    hold_to_oracle(without, np.ones(without.num_ops, np.int64), outcome)
    return set(outcome.symptoms)


def symptoms(layout: Layout, text: str, *edits: tuple[str, str]) -> set[str]:
    """Of the text with each edit made where it applies, which is at one place."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return set(run(layout, text).symptoms)


CELLS = Layout(Placement.loop(2), 1, ("", ""), (OpKind.F,), (OpKind.B,), (OpKind.W,), saved={OpKind.F: 1})
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

ALONE = replace(CELLS, placement=Placement.loop(1), blocks=("",), num_mb=2)
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
TURN = replace(CELLS, placement=Placement.v(2), blocks=("", "", "", ""))
TURNING = """
    0 COMPUTE: f0=F0.0 f3=F0.1<rf3 b3=B0.1 b0=B0.0<rb0
    1 COMPUTE: f1=F0.0<rf1 f2=F0.1 b2=B0.1<rb2 b1=B0.0
    0 SEND 1 g0: sf1=SEND_F0.0<f0 sb2=SEND_B0.1<b3
    1 RECV 0 g0: rf1=RECV_F0.0 rb2=RECV_B0.1
    1 SEND 0 g1: sf3=SEND_F0.1<f2 sb0=SEND_B0.0<b1
    0 RECV 1 g1: rf3=RECV_F0.1 rb0=RECV_B0.0
"""

DENSE = Layout(Placement.loop(1), 1, ("t",), (ATTN_F, MLP_F), (MLP_B, ATTN_B), (), saved=SAVED)
WHOLE = """
    0 COMPUTE: a=ATTN_F0.0 m=MLP_F0.0 n=MLP_B0.0 t=ATTN_B0.0
    0 DP: red=REDUCE_GRAD-1.0<t
"""
TWO_DENSE = replace(DENSE, placement=Placement.loop(2), blocks=("t", "t"))
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
    ("tt",),
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
    Placement.loop(1), 2, ("t",), (ATTN_F, OpKind.DISPATCH_F), (OpKind.DISPATCH_B, ATTN_B), (), ep=2, saved=SAVED
)
TOGETHER = """
    0 COMPUTE: a0=ATTN_F0.0 t0=ATTN_B0.0<g0 a1=ATTN_F1.0 t1=ATTN_B1.0<g1
    1 COMPUTE: A0=ATTN_F0.0 T0=ATTN_B0.0<G0 A1=ATTN_F1.0 T1=ATTN_B1.0<G1
    0 EP g0: d0=DISPATCH_F0.0<a0 g0=DISPATCH_B0.0 d1=DISPATCH_F1.0<a1 g1=DISPATCH_B1.0
    1 EP g0: D0=DISPATCH_F0.0<A0 G0=DISPATCH_B0.0 D1=DISPATCH_F1.0<A1 G1=DISPATCH_B1.0
"""

TWO_ENDS = replace(
    TWO_DENSE, weights=(HEAD_W,), saved=SAVED | {OpKind.EMBED_F: 7, OpKind.HEAD_F: 11}, blocks=("Et", "tL")
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
ENDS = replace(TWO_ENDS, placement=Placement.loop(1), blocks=("EtL",))
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
    0 DP: red=REDUCE_GRAD-1.0<g,w
"""

# as TURNING: rank 0 holds both the first stage and the last
TURN_ENDS = replace(
    TWO_ENDS, placement=Placement.v(2), blocks=("Et", "t", "t", "tL"), forward=(ATTN_F,), backward=(ATTN_B,), weights=()
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


def without_dependency(layout: Layout, text: str) -> Iterator[tuple[str, str, Outcome]]:
    """For each dependency who waits, for what, and what becomes of the text without it."""
    program, names = read(layout, text)
    for reader, waits in enumerate(program.deps(i) for i in range(len(names))):
        for gone in waits:
            draft = thaw(program)
            draft.ops[reader].deps.remove(draft.ops[gone])
            yield names[reader], names[gone], execute(freeze(draft), [1] * len(names))


# Mutations


def same(one: Program, other: Program) -> bool:
    columns = ((getattr(one, name), getattr(other, name)) for name in COLUMNS)
    return one.layout == other.layout and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in columns)
