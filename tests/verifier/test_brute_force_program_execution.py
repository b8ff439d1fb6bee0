"""The oracle of Programs itself: times, groups, launch orders and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.written_programs import (
    ALONE,
    ATTN_W,
    CELLS,
    DENSE,
    EXPERTS,
    MLP_W,
    ONE,
    PAIR,
    TOGETHER,
    TURN,
    TURNING,
    TWO_MB,
    WHOLE,
    run,
    symptoms,
)
from treadle.ir import Placement
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout

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
    both = joined, ("sf1=SEND_F1.0<f1", "sf1=SEND_F1.0+<f1")
    assert symptoms(two, TWO_MB, *both) == set()
    assert symptoms(two, TWO_MB, both[1]) == {"hang"}


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
    layout = replace(EXPERTS, num_mb=1, blocks=("tt",), forward=(OpKind.DISPATCH_F,), backward=(OpKind.DISPATCH_B,))
    lane = "DISPATCH_F0.0.0 {0}1=DISPATCH_F0.0.1 {0}2=DISPATCH_B0.0.1 {0}3=DISPATCH_B0.0.0"
    same = f"0 EP g0: a0={lane.format('a')}\n 1 EP g0: b0={lane.format('b')}"
    assert symptoms(layout, same) == set()
    turned = same.replace("b1=DISPATCH_F0.0.1", "b1=DISPATCH_F0.0.0").replace(
        "b0=DISPATCH_F0.0.0", "b0=DISPATCH_F0.0.1"
    )
    outcome = run(layout, turned)
    assert outcome.symptoms == {"wrong data"}
    assert sum("together" in note for note in outcome.notes) == 2


BOTH_ENDS = Layout(Placement.bidirectional(2), 1, ("", ""), (OpKind.F,), (OpKind.B,), (OpKind.W,), saved={OpKind.F: 1})
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
