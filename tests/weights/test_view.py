"""Pictures of weight updates: figures as data, the terminal, the page."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.support.browser import MISSING, browser
from tests.support.sheets import check_texts
from treadle.api.load_save import load
from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.verifier import verify_program
from treadle.view.boxes import ROLES
from treadle.view.character_rows import terminal_rows
from treadle.view.figure import FigureContent, draw
from treadle.view.page import page
from treadle.view.palette import PALETTES, Role, told_apart
from treadle.view.sheet import Sheet
from treadle.view.style import FigureStyle
from treadle.view.update_figure import update_boxes
from treadle.view.update_rows import buffer_rows
from treadle.weights.bucket_stream import even_stream
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_rates import simulate_update

BUFFERS = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def published() -> Trace:
    return simulate_update(lower_update(even_stream(4, 2)))


def update(num_h2d: int, num_ipc: int) -> Trace:
    return simulate_update(lower_update(even_stream(3, 3, num_h2d=num_h2d, num_ipc=num_ipc)))


def test_boxes_are_those_of_the_published_figure(published: Trace) -> None:
    boxes = update_boxes(published, list(buffer_rows(published, range(4))))
    assert [(row.rank, row.name) for row in boxes.rows] == [(d, b) for d in range(4) for b in ("H2D", "A", "B")]
    drawn = {
        (boxes.rows[row].rank, boxes.rows[row].name, ROLES[role].value, left, right)
        for row, role, left, right in zip(boxes.row, boxes.role, boxes.left, boxes.right, strict=True)
    }
    expected = set()
    for device in range(4):
        for origin in (0, 8):
            expected.add((device, "H2D", "H2D", origin, origin + 4))
            for source in range(4):
                start, buffer = origin + 4 + source, "AB"[source % 2]
                role = Role.SOURCE if source == device else Role.BROADCAST
                expected.add((device, buffer, role.value, start, start + 1))
                expected.add((device, buffer, Role.RELOAD.value, start + 1, start + 2))
    assert drawn == expected


@pytest.mark.parametrize("buffers", BUFFERS)
def test_every_op_is_in_one_row_and_none_covers_another(buffers: tuple[int, int]) -> None:
    trace = update(*buffers)
    rows = list(buffer_rows(trace, range(3)))
    assert sorted(np.concatenate([row.ops for row in rows])) == list(range(trace.program.num_ops))
    for row in rows:
        assert (trace.start[row.ops][1:] >= trace.end[row.ops][:-1]).all()


@pytest.mark.parametrize("name", PALETTES)
def test_neighbours_differ_in_grey(name: str) -> None:
    looks = [PALETTES[name][role] for role in (Role.H2D, Role.SOURCE, Role.BROADCAST, Role.RELOAD)]
    for one, other in combinations(looks, 2):
        assert told_apart(one, other), (one, other)


@pytest.mark.slow
def test_figures_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts are on the sheet, none covers another, and the same update gives the same bytes."""
    sheets: list[Sheet] = []
    save = Sheet.save

    def keep(sheet: Sheet, path: Path) -> None:
        save(sheet, path)
        sheets.append(sheet)

    monkeypatch.setattr(Sheet, "save", keep)
    for form, opening in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        for name in ("one", "two"):
            draw(update(2, 2), tmp_path / f"{name}{form}", style=FigureStyle(title="a title"))
        assert (tmp_path / f"one{form}").read_bytes().startswith(opening)
        assert (tmp_path / f"one{form}").read_bytes() == (tmp_path / f"two{form}").read_bytes()
    for buffers in BUFFERS:
        draw(update(*buffers), tmp_path / "a.png", FigureContent(ranks=range(1, 3)))
    for sheet in sheets:
        check_texts(sheet)


def test_what_figures_of_updates_do_not_have(published: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drawn by its buffers"):
        draw(published, tmp_path / "a.svg", FigureContent(memory=True))
    with pytest.raises(ValueError, match="drawn by its buffers"):
        draw(published, tmp_path / "a.svg", FigureContent(grain="lanes"))


def test_the_terminal_shows_buffers(published: Trace) -> None:
    lines = [row.plain.rstrip() for row in terminal_rows(published, 41, colour=False)]
    assert lines[:3] == [
        "0/H2D  H0------        H1------",
        "0/A            S0R0D0R0        S1R1D1R1",
        "0/B              D0R0D0R0        D1R1D1R1",
    ]
    assert len(lines) == 13
    coloured = list(terminal_rows(published, 41, colour=True))[1]
    fills = {str(span.style).split(" on ")[-1] for span in coloured.spans}
    assert fills == {PALETTES["kimi"][role].fill for role in (Role.SOURCE, Role.BROADCAST, Role.RELOAD)}


# The colour of the plot a little above a place of the page, where a box has no text.
_COLOUR = """((x, y) => {
  const plot = document.getElementById("plot"), box = plot.getBoundingClientRect(), ratio = plot.width / box.width;
  const at = [(x - box.left) * ratio, (y - 9 - box.top) * ratio].map(Math.round);
  return [...plot.getContext("2d").getImageData(at[0], at[1], 1, 1).data].slice(0, 3);
})(arguments[0], arguments[1])"""


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_page_tells_sources_apart(published: Trace, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page([("update", published)]), encoding="utf-8")
    program = published.program
    with browser(tmp_path / "profile") as window:
        window.open(tmp_path / "page.html")
        legend = window.js("document.getElementById('legend').textContent")
        assert "reload weights" in legend
        assert "dark: on its source" in legend
        assert not window.complaints()
        for op in np.flatnonzero(program.kind == OpKind.BROADCAST):
            own = program.layer[op] == program.lane_rank[program.lane_of[op]]
            fill = PALETTES["kimi"][Role.SOURCE if own else Role.BROADCAST].fill
            there = window.js("treadle.positionOf(0, arguments[0])", int(op))
            seen = window.js(_COLOUR, there["x"], there["y"])
            assert seen == pytest.approx([int(fill[i : i + 2], 16) for i in (1, 3, 5)], abs=3)


def test_a_trace_of_an_update_reads_back(published: Trace, tmp_path: Path) -> None:
    treadle.save_trace(published, tmp_path / "update.json.gz")
    back = load(tmp_path / "update.json.gz")
    assert isinstance(back, Trace)
    assert np.array_equal(back.start, published.start)
    assert np.array_equal(back.end, published.end)
    assert back.program.layout.is_update


def test_the_verifier_of_steps_says_who_judges_updates(published: Trace) -> None:
    with pytest.raises(ValueError, match="verify_update judges"):
        verify_program(published.program, published.end - published.start)
