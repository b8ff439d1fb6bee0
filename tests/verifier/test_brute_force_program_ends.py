"""The oracle of Programs itself: the embedding and the head."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.written_programs import (
    APART,
    DENSE,
    ENDS,
    HEAD_W,
    TURN_ENDS,
    TURNING_ENDED,
    TWO_ENDED,
    TWO_ENDS,
    WHOLE,
    left_out,
    run,
    symptoms,
)
from treadle.ir import Placement

WAITING = re.findall(r"(\w+)=(\w+-?[\d.]+)<(\S+)", APART)

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
    deep = replace(ENDS, blocks=("EttL",))
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
    embedding = replace(DENSE, blocks=("Et",))
    edits = ("a=ATTN_F0.0", "e=EMBED_F0.0 a=ATTN_F0.0"), ("t=ATTN_B0.0", "t=ATTN_B0.0 g=EMBED_B0.0"), ("<t", "<g")
    assert symptoms(embedding, WHOLE, *edits) == set()
    assert symptoms(replace(DENSE, blocks=("tL",)), WHOLE, *edits) >= {"unknown", "missing"}
    head = replace(DENSE, blocks=("tL",))
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


@pytest.mark.parametrize(
    "dep",
    [(reader, label, needed) for reader, label, deps in WAITING for needed in deps.split(",")],
    ids=lambda dep: f"{dep[0]} of {dep[2]}",
)
def test_each_dependency_of_ends_is_needed(dep: tuple[str, str, str]) -> None:
    reader, label, needed = dep
    (all_deps,) = [deps.split(",") for name, _, deps in WAITING if name == reader]
    left = ",".join(other for other in all_deps if other != needed)
    found = re.search(rf"\b{needed}=([A-Z_]+)", APART)
    assert found is not None
    outcome = run(ENDS, APART.replace(f"{label}<{','.join(all_deps)}", f"{label}<{left}".rstrip("<")))
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
        (("<g,w", "<t,w"), "REDUCE_GRAD -1.0 L0) does not wait for op 8 (rank 0 EMBED_B"),
    ],
    ids=["MLP_B", "HEAD_W", "EMBED_B", "REDUCE_GRAD"],
)
def test_ends_waiting_for_the_op_before_the_one_needed(edit: tuple[str, str], note: str) -> None:
    assert APART.count(edit[0]) == 1
    assert any(note in found for found in run(ENDS, APART.replace(*edit)).notes)


def test_only_the_first_of_the_backward_chain_needs_the_forward() -> None:
    # MLP_B waits for the layer's forward through HEAD_B and HEAD_F alone
    early = APART.replace("h=HEAD_F0.0<m", "h=HEAD_F0.0<a")
    (note,) = run(ENDS, early).notes
    assert "HEAD_F 0.0 L0) does not wait for op 2 (rank 0 MLP_F" in note


def test_other_stages_need_no_ends() -> None:
    # rank 1's first part has RECV_F and rank 0's backward RECV_B; what is not of their stage is not asked for
    for edit in (("a1=ATTN_F0.0<rf", "a1=ATTN_F0.0"), ("n0=MLP_B0.0<rb", "n0=MLP_B0.0")):
        (note,) = run(TWO_ENDS, TWO_ENDED.replace(*edit)).notes
        assert "RECV_" in note


def test_sends_do_not_wait_for_ends() -> None:
    late = (" w1=HEAD_W0.0", ""), ("0 SEND 1 g0", "1 COMPUTE: w1=HEAD_W0.0<k1\n 0 SEND 1 g0")
    assert symptoms(TWO_ENDS, TWO_ENDED, *late, ("<w1", "<w1,t1")) == set()
    assert symptoms(TWO_ENDS, TWO_ENDED, *late) == {"wrong data"}  # of the reduction, which needs the layer's as well
    assert symptoms(TWO_ENDS, TWO_ENDED, ("sb=SEND_B0.0<t1", "sb=SEND_B0.0<k1")) == {"wrong data"}
    assert symptoms(TWO_ENDS, TWO_ENDED, ("sf=SEND_F0.0<m0", "sf=SEND_F0.0<e0")) == {"wrong data"}


def lane_last(text: str, lane: str) -> str:
    """Changes only the order of op indices: nothing else orders the lanes."""
    assert text.count(f"{lane}\n") == 1
    return text.replace(f"{lane}\n", "\n") + f"{lane}\n"


def test_reduce_grad_of_ends() -> None:
    embed, head, weight = "0 COMPUTE: g=EMBED_B0.0<t", "0 COMPUTE: k=HEAD_B0.0<h", "0 COMPUTE: w=HEAD_W0.0<k"
    whole = replace(ENDS, weights=())
    text = APART.replace(f"{weight}\n", "\n").replace(",w", "")
    for last in (embed, head, weight):  # whatever lane is stored last
        written = lane_last(APART, last)
        assert symptoms(ENDS, written) == set()
        # HEAD_W makes the head's gradient, and HEAD_B then makes none
        for one in ("<t,w", "<g,k", "<g"):
            assert symptoms(ENDS, written, ("<g,w", one)) == {"wrong data"}
    for last in (embed, head):
        # HEAD_B makes it where it is whole; ATTN_B, MLP_B and EMBED_B come after it
        assert symptoms(whole, lane_last(text, last)) == set()
        assert symptoms(whole, lane_last(text, last), ("<g", "<k")) == {"wrong data"}


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
    layout = replace(TURN_ENDS, placement=Placement.bidirectional(2), blocks=("Et", "tL"))
    assert symptoms(layout, BOTH_ENDED) == set()
    for name in ("e0", "e1", "h0", "h1", "k0", "k1"):
        assert left_out(layout, BOTH_ENDED, name) == {"missing", "wrong data"}
    assert left_out(layout, BOTH_ENDED, "g0") == left_out(layout, BOTH_ENDED, "g1") == {"missing"}
    assert symptoms(layout, BOTH_ENDED, ("e1=EMBED_F0.1", "e1=EMBED_F0.0")) == {"unknown", "missing", "wrong data"}


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
