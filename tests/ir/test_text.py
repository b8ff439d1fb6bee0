"""The text form refuses what it would otherwise misread, and points at it."""

from __future__ import annotations

import pytest

import treadle
from treadle.ir import B, F, I, Placement

HEAD = "# treadle-schedule 1\n# name: x\n# placement: loop\n# pp: 1\n# vpp: 1\n# microbatches: 1\n"
ROW = "0: F0.0 B0.0\n"

REFUSED = {
    "a row of another rank": ("1: F0.0 B0.0\n", "expected the row of rank 0, got rank 1"),
    "no row": ("0 F0.0 B0.0\n", ""),
    "a key not known": (HEAD.replace("placement", "placment") + ROW, "did you mean 'placement'"),
    "a key without a colon": (HEAD.replace("placement:", "placement") + ROW, "not a line of a schedule"),
    "a key without a space": (HEAD.replace("# placement", "#placement") + ROW, "not a line of a schedule"),
    "a key in capitals": (HEAD.replace("placement", "Placement") + ROW, "not a line of a schedule"),
    "a key left out": (HEAD.replace("# placement: loop\n", "") + ROW, "'# placement: ...' is missing"),
    "a key twice": (HEAD + "# pp: 2\n" + ROW, "pp was given as '1' above"),
    "another version": (HEAD.replace("schedule 1", "schedule 7") + ROW, "'treadle-schedule 7' is not a form"),
    "a version further down": ("\n# treadle-schedule 7\n" + ROW, "'treadle-schedule 7' is not a form"),
    "more ranks than rows": (HEAD.replace("pp: 1", "pp: 2", 1) + ROW, "pp 2, but there are 1 rows"),
    "a size that is none": (HEAD.replace("microbatches: 1", "microbatches: one") + ROW, "whole number from 1"),
    "a channel that is none": (HEAD + "# receive 0>1: F0.0\n" + ROW, "no channel 0>1 between 1 ranks"),
    "receives twice": (HEAD + "# receive 0>1: F0.0\n# receive 0>1: F0.0\n" + ROW, "were given above"),
    "a receive of a weight half": (HEAD + "# receive 0>1: W0.0\n" + ROW, "'W0.0' is not a message"),
    "a pair of forwards": ("0: (F0.0|F1.0)\n", "not a cell"),
    "junk behind a pair": ("0: (F1.0|B0.0)x\n", ":1:15: "),
    "numbers past all limits": ("0: F999999.999\n", "at most 100000000 forwards"),
    "nothing": ("", "empty"),
    "a chunk left out beside another": (
        "0: F0.0 F0 B0.0\n1: F0.1\n",
        ":1:9: 'F0' has no chunk, and ranks have 2",
    ),
    "a chunk left out in a pair": ("0: F0.1\n1: (F1|B0.0)\n", ":2:4: '(F1|B0.0)' has no chunk"),
    "a chunk left out where there are two": (
        HEAD.replace("vpp: 1", "vpp: 2") + "0: F0 B0\n",
        "'F0' has no chunk, and ranks have 2 here; for chunk 0 write F0.0\n  0: F0 B0\n     ^",
    ),
    "a chunk left out of a receive": ("# receive 0>1: F0\n0: F0.1\n1: F0.0\n", ":1:16: 'F0' has no chunk"),
    "a dot without a chunk": ("0: F0.\n", ":1:4: 'F0.' is not a cell"),
    "a rank without a colon": ("rank0 F0 B0\n", "expected a row such as '0: F0.0 B0.0'"),
    "cells without a rank": ("F0 B0\n", "expected a row such as '0: F0.0 B0.0'"),
    "a named row of another rank": ("rank 1: F0 B0\n", "expected the row of rank 0, got rank 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    text, message = REFUSED[what]
    with pytest.raises(ValueError, match=r"\w") as caught:
        treadle.loads(text, "mine.txt")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["{}", "rank{}", "rank {}", "Rank {}"])
def test_with_one_chunk_rows_may_leave_it_out_and_name_the_rank(name: str) -> None:
    rows = ("F0 F1 B0 B1", "F0 (F1|B0) I1.0 W1")
    read = treadle.loads("".join(f"{name.format(rank)}: {row}\n" for rank, row in enumerate(rows)))
    printed = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 (F1.0|B0.0) I1.0 W1.0\n"
    assert read == treadle.loads(printed)
    assert treadle.dumps(read).endswith(printed)


def test_with_one_chunk_a_whole_file_may_leave_it_out() -> None:
    text = HEAD.replace("pp: 1", "pp: 2", 1) + "# receive 0>1: F0\n0: F0 B0\n1: F0 B0\n"
    assert treadle.loads(text).receives == {(0, 1): (F(0),)}


def test_a_file_says_its_placement_itself() -> None:
    assert treadle.loads(HEAD + ROW, placement="v").placement.name == "loop"
    assert treadle.loads("0: F0.0 F0.1 B0.1 B0.0\n", placement="v").placement.name == "v"


def test_what_python_builds_is_checked_too() -> None:
    with pytest.raises(ValueError, match="a forward and a whole backward"):
        F(1) | I(0)
    with pytest.raises(ValueError, match="no channel 0>5"):
        treadle.Schedule("x", Placement.loop(1), 1, ((F(0), B(0)),), {(0, 5): (F(0),)})
    negative = treadle.Schedule("x", Placement.loop(1), 1, ((F(-1), B(-1)),))
    assert {finding.code for finding in treadle.verify(negative).findings} >= {"T105", "T101"}
    with pytest.raises(ValueError, match="receives are one of sender, use"):
        treadle.verify(negative, receives="sendr")  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "ranks"), [(4, []), (3, [0]), (2, [0, 1])])
def test_a_limit_is_what_may_be_held(limit: int, ranks: list[int]) -> None:
    report = treadle.verify(treadle.generate("1f1b", pp=4, microbatches=8), max_activations=limit)
    assert [finding.rank for finding in report.findings] == ranks
    assert all(finding.cell == limit for finding in report.findings)


def test_a_deadlock_is_shown_before_what_follows_from_it() -> None:
    schedule = treadle.generate("dualpipe", pp=8, microbatches=32)
    codes = [finding.code for finding in treadle.verify(schedule, receives="use", ring=1).findings]
    assert codes[:2] == ["T201", "T204"]
    assert codes.count("T204") > 5


def test_a_version_that_was_never_written_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'treadle-schedule 7' is not a form this version reads"):
        treadle.loads("# treadle-schedule 7\n0: F0.0 B0.0\n")
