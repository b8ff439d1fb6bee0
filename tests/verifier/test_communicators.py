"""Orders of issue on shared communicators: cases worked out by hand, and what the report shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import treadle
from treadle.drawing import draw_circle
from treadle.files import torch_csv
from treadle.ir import Schedule, text
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder
from treadle.schedules import SCHEDULES, generate
from treadle.step import Step
from treadle.verifier.communicator_queues import COMMUNICATORS, Communicators, judge

DEFERRED = torch_csv.parse(
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)
"""Rank 0 sends F1 before it receives B0, rank 1 sends B0 before it receives F1 (pytorch#172668)."""


def words(schedule: Schedule, communicators: Communicators) -> str:
    program = lower_cells(schedule)
    return judge(program, IssueOrder.given(schedule, program), communicators).word


@pytest.mark.parametrize(
    ("communicators", "word"),
    [("channel", "ends"), ("direction", "ends"), ("pair", "hangs when large"), ("group", "hangs when large")],
)
def test_two_ranks_that_send_first_hang_where_both_directions_share(communicators: Communicators, word: str) -> None:
    assert words(DEFERRED, communicators) == word


def test_two_ranks_that_receive_first_hang_always_where_both_directions_share() -> None:
    rows = "0: F0.0 B0.0\n1: F0.0 B0.0\n# receive 0>1: F0.0\n# receive 1>0: B0.0\n"
    sound = text.parse(rows + "# issue 0: . >1 <1 .\n# issue 1: <0 . . >0\n")
    early = text.parse(rows + "# issue 0: <1 . >1 .\n# issue 1: <0 . . >0\n")
    for communicators in COMMUNICATORS:
        assert words(sound, communicators) == "ends"
        assert words(early, communicators) == ("ends" if communicators in ("channel", "direction") else "hangs")


def test_messages_of_a_batch_do_not_wait_for_each_other() -> None:
    rows = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n"
    apart = text.parse(rows + "# issue 0: . >1 . >1 <1 . <1 .\n# issue 1: <0 . . >0 <0 . . >0\n")
    batched = text.parse(rows + "# issue 0: . >1 . >1 +<1 . <1 .\n# issue 1: <0 . . >0 +<0 . . >0\n")
    one_side = text.parse(rows + "# issue 0: . >1 . >1 +<1 . <1 .\n# issue 1: <0 . . >0 <0 . . >0\n")
    assert [words(each, "pair") for each in (apart, batched, one_side)] == ["hangs when large", "ends", "ends"]


def test_a_batch_that_one_side_has_apart_hangs_if_the_other_needs_its_end() -> None:
    """The batch of rank 0 ends with its second receive, and rank 1 sends that only after it has got what comes next."""
    schedule = text.parse(
        "0: F0.0 F1.0 F2.0 B0.0 B1.0 B2.0\n1: F0.0 F1.0 B0.0 F2.0 B1.0 B2.0\n"
        "# issue 0: . >1 . >1 <1 +<1 . >1 . . <1 .\n# issue 1: <0 . <0 . . >0 <0 . . >0 . >0\n"
    )
    assert words(schedule, "pair") == "hangs"


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_for_a_large_send_holds_up_what_is_issued_after_it(waits: bool) -> None:
    """Rank 0 waits for its send before it issues the receive that rank 1's send, issued first, waits for."""
    wait = "wait>1:1 " if waits else ""
    rows = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n"
    schedule = text.parse(rows + f"# issue 0: . >1 . >1 {wait}<1 . <1 .\n# issue 1: <0 . . >0 <0 . . >0\n")
    assert words(schedule, "channel") == "ends"
    late = text.parse(rows + f"# issue 0: . >1 . >1 {wait}<1 . <1 .\n# issue 1: <0 . . >0 wait>0:0 <0 . . >0\n")
    assert words(late, "channel") == ("hangs when large" if waits else "ends")


def test_lazy_communicators_wait_for_each_other() -> None:
    """Each of three ranks in a ring comes first to the communicator that its neighbour comes to last."""
    ring = text.parse(
        "# placement: 0,3/1,4/2,5\n0: F0.0 F0.1 B0.1 B0.0\n1: F0.0 F0.1 B0.1 B0.0\n2: F0.0 F0.1 B0.1 B0.0\n"
        "# issue 0: <2 . >1 . >1 <1 . >2 <1 .\n# issue 1: <0 . >2 <0 . >2 <2 . >0 <2 . >0\n"
        "# issue 2: <1 . >0 <1 . . >1 <0 . >1\n"
    )
    program = lower_cells(ring)
    order = IssueOrder.given(ring, program)
    assert judge(program, order, "pair").word == "ends"
    verdict = judge(program, order, "pair", creation="lazy")
    assert verdict.word == "hangs"
    created = "the creation of the communicator of ranks"
    assert {wait.words for wait in verdict.circle} == {
        f"{created} 0, 2 is issued after {created} 1, 2",
        f"{created} 1, 2 is issued after {created} 0, 1",
        f"{created} 0, 1 is issued after {created} 0, 2",
    }
    (finding,) = treadle.verify(ring, lazy=True).findings
    assert "a communicator for each pair of ranks, made at its first message, always: 3 ops wait" in finding.message


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_order_over_all_messages_ends_on_any_communicators(name: str) -> None:
    schedule = generate(name, pp=4, microbatches=8)
    program = lower_cells(schedule)
    order = IssueOrder.early(program)
    assert order is not None
    for communicators in COMMUNICATORS:
        assert judge(program, order, communicators).word == "ends"
        assert judge(program, order, communicators, creation="lazy").word == "ends"


def test_the_report_has_layout_when_and_circle() -> None:
    (finding,) = treadle.verify(DEFERRED).findings
    assert str(finding) == (
        "T207 rank 0: hangs with a communicator for each pair of ranks, when messages are larger than the backend's "
        "buffer: 4 ops wait for each other in a circle; it ends with a communicator for each direction of the pipe"
    )
    assert set(finding.steps) == {
        "rank 0: receive B0.0 from rank 1 is behind send F1.0 to rank 1",
        "rank 0: send F1.0 to rank 1 waits for its partner, rank 1: receive F1.0 from rank 0",
        "rank 1: receive F1.0 from rank 0 is behind send B0.0 to rank 0",
        "rank 1: send B0.0 to rank 0 waits for its partner, rank 0: receive B0.0 from rank 1",
    }
    assert treadle.verify(DEFERRED, communicators="channel").clean
    assert not treadle.verify(generate("1f1b", pp=2, microbatches=4), communicators="pair", receives="use").clean


def test_the_circle_is_drawn_with_its_ranks_and_waits(tmp_path: Path) -> None:
    hang = Step(DEFERRED).shared_hang()
    assert hang is not None
    draw_circle(hang, tmp_path / "circle.svg")
    assert (tmp_path / "circle.svg").read_text().count("stroke: #c81e1e") >= 8  # four boxes, four arrows
    assert Step(DEFERRED).shared_hang(communicators="channel") is None


def test_an_op_that_is_issued_before_what_it_needs_is_named() -> None:
    schedule = text.parse("0: F0.0 B0.0\n1: F0.0 B0.0\n# issue 0: >1 . <1 .\n# issue 1: . <0 . >0\n")
    found = [str(finding) for finding in treadle.verify(schedule).findings]
    assert found == [
        "T103 rank 1: F0.0 is issued before receive F0.0 from rank 0, which it needs",
        "T103 rank 0: send F0.0 to rank 1 is issued before F0.0, which it needs",
    ]


def test_an_order_that_has_other_messages_than_the_rows_is_refused() -> None:
    rows = "0: F0.0 B0.0\n1: F0.0 B0.0\n"
    for issue, message in {
        "# issue 0: . >1 >1 <1 .\n# issue 1: <0 . . >0\n": "rank 0 has at least 2 sends to rank 1, and its row has 1",
        "# issue 0: . >1 .\n# issue 1: <0 . . >0\n": "rank 0 has only 0 receives from rank 1, and its row has 1",
        "# issue 0: . wait>1:0 >1 <1 .\n# issue 1: <0 . . >0\n": "rank 0 waits for send 0 to rank 1 before it issues",
    }.items():
        with pytest.raises(ValueError, match=message):
            treadle.verify(text.parse(rows + issue))
