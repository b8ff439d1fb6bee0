"""Steps that do not finish: what ran, what waits and the circle, as data, in a figure and on the terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.support.sheets import check_texts
from treadle.costs import UNIT_COSTS
from treadle.ir.ops import LaneKind
from treadle.ir.trace import Trace
from treadle.passes.cells import lower_cells
from treadle.view.character_rows import terminal_rows
from treadle.view.figure import FigureContent, draw, sheet_of
from treadle.view.hang import Hang, run_to_hang
from treadle.view.style import FigureStyle

BETWEEN_RANKS = "0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n"
IN_ONE_ROW = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B1.0 F1.0 B0.0\n"
WITHOUT_A_PART = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 B1.0\n"


def stopped(rows: str) -> tuple[Trace, Hang]:
    found = run_to_hang(lower_cells(treadle.loads(rows)), UNIT_COSTS)
    assert found is not None
    return found


def labels(trace: Trace, ops: list[int]) -> list[str]:
    return [f"{trace.program.op(op).lane.rank} {trace.program.op(op)}" for op in ops]


def test_a_step_that_finishes_does_not_hang() -> None:
    assert run_to_hang(lower_cells(treadle.generate("zb-v", pp=4, microbatches=8)), UNIT_COSTS) is None


@pytest.mark.parametrize(
    ("rows", "circle"),
    [(BETWEEN_RANKS, ["0 B0.0", "0 F1.0", "1 B0.0", "1 F1.0"]), (IN_ONE_ROW, ["1 B1.0", "1 F1.0"])],
)
def test_the_circle_is_the_ops_that_wait_for_each_other(rows: str, circle: list[str]) -> None:
    """A pair's second is the next pair's first, the last leads back, and all of them never start."""
    trace, hang = stopped(rows)
    waits, wanted = zip(*hang.circle, strict=True)
    assert sorted(labels(trace, list(waits))) == circle
    assert [*waits[1:], waits[0]] == list(wanted)
    assert hang.waiting[list(waits)].all()
    assert (trace.program.lane_kind[trace.program.lane_of[list(waits)]] == LaneKind.COMPUTE).all()


@pytest.mark.parametrize("rows", [BETWEEN_RANKS, IN_ONE_ROW, WITHOUT_A_PART])
def test_what_ran_ends_before_the_hang_and_what_waits_stands_behind_it(rows: str) -> None:
    trace, hang = stopped(rows)
    ran = ~hang.waiting
    assert trace.end[ran].max() == hang.time
    shown = hang.waiting & (trace.end > trace.start)
    assert trace.start[shown].min() > hang.time
    for lane in np.flatnonzero(trace.program.lane_kind == LaneKind.COMPUTE):
        ops = np.arange(trace.program.lane_ptr[lane], trace.program.lane_ptr[lane + 1])
        ops = ops[trace.end[ops] > trace.start[ops]]
        assert (trace.end[ops[:-1]] <= trace.start[ops[1:]]).all()
    assert shown[[op for op, _ in hang.circle]].all()


def test_what_nothing_provides_hangs_without_a_circle() -> None:
    trace, hang = stopped(WITHOUT_A_PART)
    assert hang.circle == ()
    assert hang.waiting.any()
    assert "! waits" not in "".join(row.plain for row in terminal_rows(trace, 80, colour=False, hang=hang))


@pytest.mark.parametrize(("rows", "form"), [(BETWEEN_RANKS, ".svg"), (IN_ONE_ROW, ".png"), (WITHOUT_A_PART, ".pdf")])
def test_figures_of_a_hang(rows: str, form: str, tmp_path: Path) -> None:
    trace, hang = stopped(rows)
    draw(trace, tmp_path / f"a{form}", hangs=[hang])
    for style in (FigureStyle(title="deadlock: why"), FigureStyle(width="column"), FigureStyle(fold=2)):
        sheet = sheet_of([trace], style=style, hangs=[hang])
        said = [text.get_text() for text in sheet.axes.texts]
        assert "hangs here" in said
        assert ("Circle: each waits for the next" in said) == bool(hang.circle)
        sheet.save(tmp_path / "b.png")
        check_texts(sheet)
    with pytest.raises(ValueError, match="no memory curve"):
        draw(trace, tmp_path / "a.svg", FigureContent(memory=True), hangs=[hang])


def test_the_terminal_marks_what_waits() -> None:
    trace, hang = stopped(BETWEEN_RANKS)
    rows = [row.plain for row in terminal_rows(trace, 80, colour=False, hang=hang)]
    assert rows[0].index("F0") < rows[0].index("!B0") < rows[0].index("!F1")
    assert rows[1].index("F0") < rows[1].index("!F1") < rows[1].index("!B0")
    assert rows[-1] == "hangs at 2: ? never starts; ! waits in a circle"
