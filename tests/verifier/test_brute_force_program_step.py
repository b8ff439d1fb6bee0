"""The oracle of Programs itself: ties between stages, and what ends a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.support.written_blocks import (
    OF_A_REPLICA,
    REPLICATED,
    STEP,
    STEP_ENDED,
    TIED,
    TIED_ALONE,
    TIED_CHUNKS,
    TIED_REPLICAS,
    TIED_STEP,
)
from tests.support.written_programs import (
    ALONE,
    CELLS,
    ONE,
    TURN,
    TURNING,
    left_out,
    run,
    symptoms,
    without_dependency,
)
from treadle.ir import Placement
from treadle.ir.ops import OpKind

CLIP, OPTIMIZER, GATHER_PARAMS = OpKind.CLIP, OpKind.OPTIMIZER, OpKind.GATHER_PARAMS

# Ties


@pytest.mark.parametrize("name", ["x0", "x1"])
def test_missing_ties(name: str) -> None:
    # the group of two hangs without one of them, so each is alone here
    text = TIED_STEP.replace("TIED g2", "TIED")
    assert left_out(TIED, text, name) == {"missing"}


def test_missing_tie_of_a_rank_alone() -> None:
    assert left_out(TIED_CHUNKS, TIED_ALONE, "x") == {"missing"}


def test_ties_are_of_the_ranks_that_have_a_stage_of_them() -> None:
    # rank 0 holds stages 0 and 3, rank 1 stages 1 and 2
    own = replace(TURN, tied=((0, 3),))
    assert symptoms(own, TURNING) == {"missing"}
    assert symptoms(own, f"{TURNING}\n 0 TIED: x=REDUCE_TIED-1.0<b0") == set()
    both = f"{TURNING}\n 0 TIED: x=REDUCE_TIED-1.0<b0\n 1 TIED: y=REDUCE_TIED-1.0<b1"
    assert symptoms(own, both) == {"unknown"}
    assert symptoms(TURN, both) == {"unknown"}


def test_a_tie_is_labelled_by_the_lowest_chunk_in_it() -> None:
    # stage 2 is chunk 1 of rank 1, stage 3 chunk 1 of rank 0
    layout = replace(TURN, tied=((2, 3),))
    text = f"{TURNING}\n 0 TIED g2: x=REDUCE_TIED-1.1<b3\n 1 TIED g2: y=REDUCE_TIED-1.1<b2"
    assert symptoms(layout, text) == set()
    assert symptoms(layout, text, ("y=REDUCE_TIED-1.1", "y=REDUCE_TIED-1.0")) == {"unknown", "missing"}
    # of a tie that has both of a rank's chunks it is the first; and both gradients are needed
    whole = replace(TIED_CHUNKS, blocks=("E", "L"))
    assert symptoms(whole, TIED_ALONE, ("x=REDUCE_TIED-1.0", "x=REDUCE_TIED-1.1")) == {"unknown", "missing"}


@pytest.mark.parametrize("label", ["0.0", "-1.2", "-1.-1", "-1.0.1", "-1.0.-1"])
def test_ties_that_do_not_exist(label: str) -> None:
    assert symptoms(TIED_CHUNKS, f"{TIED_ALONE}\n 0 TIED: u=REDUCE_TIED{label}") == {"unknown"}
    assert symptoms(TIED_CHUNKS, f"{TIED_ALONE}\n 0 DP: u=REDUCE_TIED-1.0") == {"unknown"}
    assert symptoms(TIED_CHUNKS, f"{TIED_ALONE}\n 0 TIED: u=REDUCE_TIED-1.0<x") == {"double"}


def test_a_tie_needs_the_last_gradient_of_each_of_its_chunks() -> None:
    # the last by index: HEAD_W of chunk 1, EMBED_B of chunk 0
    for edit in (("<g,w", "<g"), ("<g,w", "<w")):
        (note,) = run(TIED_CHUNKS, TIED_ALONE.replace(*edit)).notes
        assert "REDUCE_TIED -1.0 L0) does not wait for" in note
    whole = replace(TIED_CHUNKS, weights=())
    assert symptoms(whole, TIED_ALONE, ("0 COMPUTE: w=HEAD_W0.1<k", ""), ("<g,w", "<g")) == set()
    assert symptoms(whole, TIED_ALONE, ("0 COMPUTE: w=HEAD_W0.1<k", ""), ("<g,w", "<k")) == {"wrong data"}


def test_a_tie_needs_no_reduction_over_replicas() -> None:
    reduced = f"{TIED_ALONE}\n 0 DP: r0=REDUCE_GRAD-1.0<g r1=REDUCE_GRAD-1.1<w"
    assert symptoms(TIED_CHUNKS, reduced) == set()
    assert symptoms(TIED_CHUNKS, reduced, ("x=REDUCE_TIED-1.0<g,w", "x=REDUCE_TIED-1.0<r1")) == set()


def test_ties_whose_gradients_are_not_there() -> None:
    assert symptoms(TIED_CHUNKS, "0 TIED: x=REDUCE_TIED-1.0") == {"missing", "wrong data"}


def test_two_ties_of_a_rank() -> None:
    layout = replace(TURN, tied=((0, 3), (1, 3)))
    text = f"""{TURNING}
        0 TIED: x=REDUCE_TIED-1.0<b0
        0 TIED g2: y=REDUCE_TIED-1.1.1<b3
        1 TIED g2: z=REDUCE_TIED-1.0.1<b1
    """
    assert symptoms(layout, text) == set()
    for name in ("x", "z"):
        assert "missing" in left_out(layout, text, name)
    # the same tie is of another chunk, and so another stage, on the other rank: that is no crossing, another tie is
    both = replace(TURN, tied=((0, 1), (2, 3)))
    lanes = "{0} TIED g2: x{0}=REDUCE_TIED-1.0.0<{1} y{0}=REDUCE_TIED-1.1.1<{2}"
    pair = f"{TURNING}\n {lanes.format(0, 'b0', 'b3')}\n {lanes.format(1, 'b1', 'b2')}"
    assert symptoms(both, pair) == set()
    swapped = "y1=REDUCE_TIED-1.1.1<b2 x1=REDUCE_TIED-1.0.0<b1"
    assert symptoms(both, pair, ("x1=REDUCE_TIED-1.0.0<b1 y1=REDUCE_TIED-1.1.1<b2", swapped)) == {"wrong data"}


def test_ties_of_both_pipes() -> None:
    # each rank holds the first stage of one pipe and the last of the other
    layout = replace(CELLS, placement=Placement.bidirectional(2), tied=((0, 1),))
    text = """
        0 COMPUTE: f0=F0.0 f1=F0.1<rf0 b1=B0.1 b0=B0.0<rb0
        1 COMPUTE: g0=F0.1 g1=F0.0<rf1 c1=B0.0 c0=B0.1<rb1
        0 SEND 1 g0: sf0=SEND_F0.0<f0 sb0=SEND_B0.1<b1
        1 RECV 0 g0: rf1=RECV_F0.0 rb1=RECV_B0.1
        1 SEND 0 g1: sf1=SEND_F0.1<g0 sb1=SEND_B0.0<c1
        0 RECV 1 g1: rf0=RECV_F0.1 rb0=RECV_B0.0
        0 TIED g2: x=REDUCE_TIED-1.0<b0
        1 TIED g2: y=REDUCE_TIED-1.0<c0
    """
    assert symptoms(layout, text) == set()
    assert symptoms(layout, text, ("x=REDUCE_TIED-1.0<b0", "x=REDUCE_TIED-1.0<b1")) == {"wrong data"}


# What ends a step


@pytest.mark.parametrize("name", ["c0", "c1", "o0", "o1", "p0", "p1"])
def test_missing_ends_of_a_step(name: str) -> None:
    text = TIED_STEP.replace("WORLD g3", "WORLD")
    assert left_out(TIED, text, name) == ({"missing"} if name[0] == "p" else {"missing", "wrong data"})


FORMS = {
    (): "",
    (OPTIMIZER,): "0 COMPUTE: o=OPTIMIZER-1.0<r",
    (CLIP, OPTIMIZER): "0 WORLD: c=CLIP-1.0<r\n 0 COMPUTE: o=OPTIMIZER-1.0<c",
    (OPTIMIZER, GATHER_PARAMS): "0 COMPUTE: o=OPTIMIZER-1.0<r\n 0 DP: p=GATHER_PARAMS-1.0<o",
    (CLIP, OPTIMIZER, GATHER_PARAMS): STEP_ENDED.partition("0 WORLD")[1] + STEP_ENDED.partition("0 WORLD")[2],
}
UNENDED = STEP_ENDED.partition("0 WORLD")[0]


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: tuple[OpKind, ...]) -> None:
    layout = replace(STEP, step_end=form)
    assert symptoms(layout, UNENDED + FORMS[form]) == set()
    assert all(outcome.symptoms == {"wrong data"} for *_, outcome in without_dependency(layout, UNENDED + FORMS[form]))
    # without a reduction the end of the step waits for the gradient itself
    alone = (UNENDED.replace("0 DP: r=REDUCE_GRAD-1.0<t", "") + FORMS[form]).replace("<r", "<t")
    assert symptoms(layout, alone) == set()
    assert all(outcome.symptoms == {"wrong data"} for *_, outcome in without_dependency(layout, alone))
    for other in FORMS:
        found = symptoms(replace(STEP, step_end=other), UNENDED + FORMS[form])
        assert ("unknown" in found) == bool(set(form) - set(other))
        assert ("missing" in found) == bool(set(other) - set(form))


@pytest.mark.parametrize(("kind", "lane"), [("CLIP", "WORLD"), ("OPTIMIZER", "COMPUTE"), ("GATHER_PARAMS", "DP")])
def test_ends_of_a_step_that_do_not_exist(kind: str, lane: str) -> None:
    for label in ("0.0", "-1.1", "-1.-1", "-1.0.1", "-1.0.-1"):
        assert symptoms(STEP, f"{STEP_ENDED}\n 0 {lane}: u={kind}{label}") == {"unknown"}
    assert symptoms(STEP, f"{STEP_ENDED}\n 0 HOST: u={kind}-1.0") == {"unknown"}
    # p ends behind all
    assert symptoms(STEP, f"{STEP_ENDED}\n 0 {lane}: u={kind}-1.0<p") == {"double"}
    # of a rank's chunks it is chunk 0 alone
    assert symptoms(TIED_REPLICAS, f"{REPLICATED}\n 0 {lane}: u={kind}-1.1") == {"unknown"}


def test_the_end_of_a_step_waits_for_all_of_its_rank() -> None:
    # rank 0's chunk 1 ends before its chunk 0: what is last on the rank is the gradient of chunk 0
    ended = replace(TURN, step_end=(OPTIMIZER,))
    text = f"{TURNING}\n 0 COMPUTE: o0=OPTIMIZER-1.0<b0\n 1 COMPUTE: o1=OPTIMIZER-1.0<b1"
    assert symptoms(ended, text) == set()
    assert symptoms(ended, text, ("o0=OPTIMIZER-1.0<b0", "o0=OPTIMIZER-1.0<b3")) == {"wrong data"}
    # besides, for the last of its reductions by index
    reduced = f"""{text}
        0 DP: s0=REDUCE_GRAD-1.0<b0 s1=REDUCE_GRAD-1.1
        1 DP: S0=REDUCE_GRAD-1.0<b1 S1=REDUCE_GRAD-1.1
    """
    assert symptoms(ended, reduced) == {"wrong data"}
    waiting = ("o0=OPTIMIZER-1.0<b0", "o0=OPTIMIZER-1.0<s1"), ("o1=OPTIMIZER-1.0<b1", "o1=OPTIMIZER-1.0<S1")
    assert symptoms(ended, reduced, *waiting) == set()
    assert symptoms(ended, reduced, *waiting, ("o1=OPTIMIZER-1.0<S1", "o1=OPTIMIZER-1.0<S0")) == {"wrong data"}
    # and of its ties
    tied = replace(ended, tied=((0, 1),))
    ties = f"{reduced}\n 0 TIED: x=REDUCE_TIED-1.0<b0\n 1 TIED: y=REDUCE_TIED-1.0<b1"
    assert symptoms(tied, ties, *waiting) == {"wrong data"}
    more = ("o0=OPTIMIZER-1.0<b0", "o0=OPTIMIZER-1.0<s1,x"), ("o1=OPTIMIZER-1.0<b1", "o1=OPTIMIZER-1.0<S1,y")
    assert symptoms(tied, ties, *more) == set()
    # each rank for its own
    assert symptoms(ended, text, ("o1=OPTIMIZER-1.0<b1", "o1=OPTIMIZER-1.0<f1")) == {"wrong data"}


def test_an_optimizer_needs_its_clip_and_nothing_else() -> None:
    # a CLIP that waits for neither the gradient nor the reduction is given wrong data twice, the optimizer is not
    notes = run(STEP, STEP_ENDED.replace("c=CLIP-1.0<r", "c=CLIP-1.0")).notes
    assert len(notes) == 2
    assert all("CLIP -1.0 L0) does not wait for" in note for note in notes)
    (note,) = run(STEP, STEP_ENDED.replace("o=OPTIMIZER-1.0<c", "o=OPTIMIZER-1.0<r")).notes
    assert "OPTIMIZER -1.0 L0) does not wait for op 3 (rank 0 CLIP" in note


def test_ends_of_a_step_at_the_grain_of_cells() -> None:
    layout = replace(CELLS, tied=((0, 1), (0, 1)), step_end=(CLIP, OPTIMIZER))
    text = (
        ONE
        + """
        0 TIED g2: x0=REDUCE_TIED-1.0.0<b0 y0=REDUCE_TIED-1.0.1<b0
        1 TIED g2: x1=REDUCE_TIED-1.0.0<b1 y1=REDUCE_TIED-1.0.1<b1
        0 WORLD g3: c0=CLIP-1.0<y0
        1 WORLD g3: c1=CLIP-1.0<y1
        0 COMPUTE: o0=OPTIMIZER-1.0<c0
        1 COMPUTE: o1=OPTIMIZER-1.0<c1
    """
    )
    assert symptoms(layout, text) == set()
    # W makes the gradient where the backward is in halves
    halves = ("b1=B0.0<f1", "b1=I0.0<f1 w1=W0.0")
    split = text.replace("0.0<b1 y1=REDUCE_TIED-1.0.1<b1", "0.0<w1 y1=REDUCE_TIED-1.0.1<w1")
    assert symptoms(layout, split, halves) == set()
    # the two ranks reduce together: x1 waits for b0, and so for I but not for W
    assert symptoms(layout, split, halves, ("x1=REDUCE_TIED-1.0.0<w1", "x1=REDUCE_TIED-1.0.0<b1")) == {"wrong data"}


def test_an_end_is_asked_for_where_backwards_are_halves() -> None:
    cells = replace(ALONE, num_mb=1, step_end=(OPTIMIZER,))
    assert symptoms(cells, "0 COMPUTE: f=F0.0 i=I0.0 w=W0.0") == {"missing"}
    assert symptoms(cells, "0 COMPUTE: f=F0.0 i=I0.0 w=W0.0 o=OPTIMIZER-1.0") == set()


# Groups over replicas


def test_replicas_end_together() -> None:
    # the slow gradient of rank 1 holds up both: e h k g, r, c, o, p, and R beside g
    assert run(TIED_REPLICAS, REPLICATED).makespan == 8
    assert run(TIED_REPLICAS, REPLICATED, g1=10).makespan == 8 + 9
    assert run(TIED_REPLICAS, REPLICATED, c0=5, o1=3).makespan == 8 + 4 + 2


def test_replicas_that_lack_an_end_hang() -> None:
    for name in ("x1", "p1"):
        assert left_out(TIED_REPLICAS, REPLICATED, name) == {"missing", "hang"}
    assert left_out(TIED_REPLICAS, REPLICATED, "c1") == {"missing", "hang", "wrong data"}


def test_replicas_in_another_order() -> None:
    # GATHER_PARAMS with REDUCE_GRAD: another kind, and other labels
    order = "R1=REDUCE_GRAD-1.1<k1 r1=REDUCE_GRAD-1.0<g1"
    assert symptoms(TIED_REPLICAS, REPLICATED, (order, "r1=REDUCE_GRAD-1.0<g1 R1=REDUCE_GRAD-1.1<k1")) >= {"wrong data"}
    late = " p1=GATHER_PARAMS-1.0<o1"
    assert "hang" in symptoms(TIED_REPLICAS, REPLICATED, (f"{order}{late}", f"{late.strip()} {order}"))


def test_sizes_of_replicas() -> None:
    for op in ("x1=REDUCE_TIED-1.0", "c1=CLIP-1.0", "p1=GATHER_PARAMS-1.0"):
        assert symptoms(TIED_REPLICAS, REPLICATED, (op, f"{op}!8")) == {"hang"}
        twin = op.replace("1=", "0=")
        assert symptoms(TIED_REPLICAS, REPLICATED, (op, f"{op}!8"), (twin, f"{twin}!8")) == set()


def test_all_ranks_of_a_mesh() -> None:
    # ranks 0 and 1 are the first stage of two replicas, ranks 2 and 3 the last
    first = """
        {0} COMPUTE: e{0}=EMBED_F0.0 g{0}=EMBED_B0.0<rb{0} o{0}=OPTIMIZER-1.0<c{0}
        {0} SEND {1} g{0}: sf{0}=SEND_F0.0<e{0}
        {0} RECV {1} g{1}: rb{0}=RECV_B0.0
        {0} TIED g4: x{0}=REDUCE_TIED-1.0<g{0}
        {0} WORLD g5: c{0}=CLIP-1.0<x{0}
        {0} DP g6: p{0}=GATHER_PARAMS-1.0<o{0}
    """
    last = """
        {1} COMPUTE: h{0}=HEAD_F0.0<rf{0} k{0}=HEAD_B0.0 O{0}=OPTIMIZER-1.0<C{0}
        {1} RECV {0} g{0}: rf{0}=RECV_F0.0
        {1} SEND {0} g{1}: sb{0}=SEND_B0.0<k{0}
        {1} TIED g4: X{0}=REDUCE_TIED-1.0<k{0}
        {1} WORLD g5: C{0}=CLIP-1.0<X{0}
        {1} DP g7: P{0}=GATHER_PARAMS-1.0<O{0}
    """
    text = "".join(half.format(*ranks) for half, ranks in product((first, last), ((0, 2), (1, 3))))
    for mesh in ({"dp": 2}, {"ep": 2}):
        layout = replace(TIED, **mesh)  # type: ignore[arg-type]
        assert symptoms(layout, text) == set()
        # one group over all stages is no crossing for what belongs to no stage
        assert symptoms(layout, text.replace("g7", "g6")) == set()
        assert left_out(layout, text.replace("C1=CLIP-1.0<X1", "C1=CLIP-1.0<X1,k1"), "X1") == {"missing", "hang"}


# Launch order


def test_ties_and_clips_are_launched() -> None:
    launched = OF_A_REPLICA
    for number, op in enumerate(("GRAD-1.1", "GRAD-1.0", "TIED-1.0", "CLIP-1.0", "PARAMS-1.0")):
        launched = launched.replace(op, f"{op}@{number}")
    one, other = launched.format(r=0), launched.format(r=1)
    assert symptoms(TIED_REPLICAS, one + other) == set()
    # OPTIMIZER computes
    assert symptoms(TIED_REPLICAS, one + other, ("o0=OPTIMIZER-1.0", "o0=OPTIMIZER-1.0@5")) == {"launch order"}
    assert symptoms(TIED_REPLICAS, one + other, ("x0=REDUCE_TIED-1.0@2", "x0=REDUCE_TIED-1.0")) == {"launch order"}
    # a clip before what it waits for
    early = one.replace("TIED-1.0@2", "TIED-1.0@7").replace("CLIP-1.0@3", "CLIP-1.0@2").replace("@7", "@3")
    assert symptoms(TIED_REPLICAS, early + other) == {"launch order"}
    # the two ranks in different orders
    turned = one.replace("TIED-1.0@2", "TIED-1.0@7").replace("GRAD-1.0@1", "GRAD-1.0@2").replace("@7", "@1")
    assert symptoms(TIED_REPLICAS, turned + other) == {"launch order"}
