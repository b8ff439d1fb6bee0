"""Figures: what they show is checked as data (boxes, texts, curves), what they look like by rules on colours."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection

import treadle
from tests.support.sheets import check_texts
from treadle.costs import UNIT_COSTS, Costs, load_costs
from treadle.ir.execute import Times
from treadle.ir.memory import peaks
from treadle.ir.ops import UPDATE, LaneKind, OpKind
from treadle.ir.trace import Trace
from treadle.schedules import SCHEDULES
from treadle.view.box_text import ABOVE, SIDE, extent, fit
from treadle.view.boxes import LANE_ROWS, Boxes, cell_boxes, lane_boxes
from treadle.view.figure import FigureContent, cell_sheet, draw, draw_cell, sheet_of
from treadle.view.memory_curves import MemoryUnit, held, memory_unit
from treadle.view.palette import PALETTES, ROLE_OF, Look, Palette, Role, told_apart
from treadle.view.panels import PANEL_NAMES, cell_panel
from treadle.view.pipeline_phases import Phase, extra_cells, phases, pick_cell
from treadle.view.sheet import LEAST_PT
from treadle.view.style import WIDTHS, FigureStyle
from treadle.view.window import held_within, strips, within

DEEPSEEK = load_costs("deepseek-v3-h800")
PHASES: tuple[Phase, ...] = ("warmup", "steady", "cooldown")


def trace_of(name: str, costs: Costs = UNIT_COSTS, pp: int = 4, layers: int | None = None) -> Trace:
    microbatches = 2 * pp
    schedule = treadle.generate(name, pp=pp, microbatches=microbatches)
    options = treadle.LoweringOptions(layers=layers, offload=layers is not None, moe=layers is not None)
    return treadle.simulate(treadle.lower(schedule, costs, options), costs)


@pytest.fixture(scope="module")
def cells() -> Trace:
    return trace_of("interleaved-overlap")


@pytest.fixture(scope="module")
def lanes() -> Trace:
    return trace_of("interleaved-overlap", DEEPSEEK, layers=2)


@pytest.mark.parametrize("form", [".svg", ".png", ".pdf"])
def test_every_form_is_written(form: str, cells: Trace, lanes: Trace, tmp_path: Path) -> None:
    opening = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[form]
    for number, trace in enumerate((cells, lanes)):
        draw(trace, tmp_path / f"{number}{form}", FigureContent(memory=True))
        assert (tmp_path / f"{number}{form}").read_bytes().startswith(opening)
    draw_cell(lanes, "steady", tmp_path / f"cell{form}")
    draw([cells, trace_of("1f1b")], tmp_path / f"two{form}", FigureContent(memory=True))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("form", [".svg", ".png", ".pdf"])
def test_the_same_trace_gives_the_same_bytes(form: str, cells: Trace, tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw(cells, tmp_path / f"{name}{form}", FigureContent(memory=True))
    assert (tmp_path / f"one{form}").read_bytes() == (tmp_path / f"two{form}").read_bytes()


@pytest.mark.slow
def test_another_process_gives_the_same_svg(tmp_path: Path) -> None:
    code = (
        "import sys, treadle; from treadle.costs import UNIT_COSTS as costs; from treadle.view.figure import draw\n"
        "schedule = treadle.generate('zb-v', pp=2, microbatches=4)\n"
        "draw(treadle.simulate(treadle.lower(schedule, costs, treadle.LoweringOptions()), costs), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "theirs.svg")], check=True)
    draw(trace_of("zb-v", pp=2), tmp_path / "ours.svg")
    assert (tmp_path / "ours.svg").read_bytes() == (tmp_path / "theirs.svg").read_bytes()


@pytest.mark.parametrize("name", SCHEDULES)
def test_cells_have_the_times_of_the_trace(name: str) -> None:
    trace = trace_of(name)
    program = trace.program
    boxes = cell_boxes(trace, range(4))
    assert sorted(boxes.op) == list(np.flatnonzero(program.kind <= OpKind.W))
    second = program.joined[boxes.op]
    first = np.r_[second[1:], False]
    assert np.allclose(boxes.left[~second] * trace.clock.ticks, trace.start[boxes.op[~second]])
    assert np.allclose(boxes.right[~first] * trace.clock.ticks, trace.end[boxes.op[~first]])
    assert np.array_equal(boxes.right[first], boxes.left[second])
    assert np.array_equal(boxes.row, program.lane_rank[program.lane_of[boxes.op]])
    assert list(boxes.says[0]) == [str(mb) for mb in program.mb[boxes.op]]


def test_lanes_have_the_times_of_the_trace(lanes: Trace) -> None:
    boxes = lane_boxes(lanes, range(4))
    assert np.allclose(boxes.left * lanes.clock.ticks, lanes.start[boxes.op])
    assert np.allclose(boxes.right * lanes.clock.ticks, lanes.end[boxes.op])
    kind = lanes.program.kind
    received = np.isin(kind, (OpKind.RECV_F, OpKind.RECV_B))
    assert sorted(boxes.op) == list(np.flatnonzero((lanes.end > lanes.start) & ~received))
    names = dict(LANE_ROWS)
    for op, row in zip(boxes.op, boxes.row, strict=True):
        assert OpKind(kind[op]).lane in names[boxes.rows[row].name]
        assert boxes.rows[row].rank == lanes.program.op(int(op)).lane.rank


def overlapping(boxes: Boxes) -> int:
    """Pairs of boxes that cover each other."""
    count = 0
    for row in range(len(boxes.rows)):
        mine = np.flatnonzero(boxes.row == row)
        for top in np.unique(boxes.top[mine]):
            track = mine[(boxes.top[mine] <= top) & (boxes.bottom[mine] > top)]
            track = track[np.argsort(boxes.left[track])]
            count += int((boxes.right[track[:-1]] > boxes.left[track[1:]] + 1e-9).sum())
        assert (boxes.top[mine] >= boxes.rows[row].top - 1e-9).all()
        assert (boxes.bottom[mine] <= boxes.rows[row].bottom + 1e-9).all()
    assert all(upper.bottom <= lower.top for upper, lower in zip(boxes.rows, boxes.rows[1:], strict=False))
    return count


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_overlaps(name: str) -> None:
    assert overlapping(cell_boxes(trace_of(name), range(4))) == 0
    by_layer = trace_of(name, DEEPSEEK, layers=2)
    assert overlapping(lane_boxes(by_layer, range(4))) == 0


def test_nothing_overlaps_in_panels(lanes: Trace) -> None:
    for which in PHASES:
        assert overlapping(cell_panel(lanes, which)) == 0


@pytest.mark.parametrize("points_per_unit", [2.0, 9.0, 14.0, 40.0])
def test_text_fits_its_box_or_is_left_out(points_per_unit: float, cells: Trace, lanes: Trace) -> None:
    per_layer = lane_boxes(lanes, range(4))
    for boxes, scale in ((cell_boxes(cells, range(4)), points_per_unit), (per_layer, points_per_unit / 5000)):
        labels = fit(boxes, scale)
        for i, text in enumerate(labels.text):
            if text:
                width, height = (size * labels.size for size in extent(text))
                assert width + 2 * SIDE <= (boxes.right[i] - boxes.left[i]) * scale
                assert height + 2 * ABOVE <= boxes.bottom[i] - boxes.top[i]
                assert text in (says[i] for says in boxes.says)


def test_text_is_there_where_there_is_room(cells: Trace) -> None:
    boxes = cell_boxes(cells, range(4))
    assert (fit(boxes, 14.0).text != "").all()
    assert (fit(boxes, 1.0).text == "").all()


def neighbours(palette: Palette) -> list[tuple[Look, Look]]:
    """Looks that may lie side by side: those of one row of lanes, and on compute those of later chunks too."""
    pairs = []
    for _, kinds in LANE_ROWS:
        for update in (False, True):  # no Program is of a step and of an update
            here = {role for kind, role in ROLE_OF.items() if kind.lane in kinds and (kind in UPDATE) == update}
            looks = [palette[role] for role in Role if role in here]
            if LaneKind.COMPUTE in kinds:
                looks += [look.of_later_chunk() for look in looks]
                pairs += [(a, b) for a, b in combinations(looks, 2) if a.hatch == "" or a.hatch != b.hatch]
            else:
                pairs += list(combinations(looks, 2))
    return pairs


@pytest.mark.parametrize("name", PALETTES)
def test_neighbours_differ_in_grey(name: str) -> None:
    palette = PALETTES[name]
    assert set(palette) == set(Role)
    for one, other in neighbours(palette):
        assert told_apart(one, other), (one, other, one.lightness, other.lightness)


@pytest.mark.parametrize("name", PALETTES)
def test_text_stands_out(name: str) -> None:
    for role in Role:
        for look in (PALETTES[name][role], PALETTES[name][role].of_later_chunk()):
            assert abs(look.lightness - Look(look.text).lightness) >= 45, (role, look)


def test_lightness_is_that_of_cie() -> None:
    assert Look("#ffffff").lightness == pytest.approx(100, abs=0.01)
    assert Look("#000000").lightness == pytest.approx(0, abs=0.01)
    assert Look("#777777").lightness == pytest.approx(50.03, abs=0.05)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_that_of_the_memory(name: str) -> None:
    for trace in (trace_of(name), trace_of(name, DEEPSEEK, layers=2)):
        unit = memory_unit(trace)
        wanted = peaks(trace.program, Times(trace.start, trace.end))
        for curve in held(trace, range(4), unit):
            assert curve.peak == wanted.size[curve.rank] / unit.size == curve.size.max()
            assert curve.peak_time * trace.clock.ticks == pytest.approx(wanted.time[curve.rank])
            assert curve.size[np.searchsorted(curve.time, curve.peak_time)] == curve.peak
            assert curve.size[-1] == 0


def test_memory_is_counted_in_what_is_handy(cells: Trace, lanes: Trace) -> None:
    assert memory_unit(cells) == MemoryUnit("chunks", 1.0)
    assert memory_unit(lanes).name == "GB"


def test_phases_and_the_extra_forward(cells: Trace, lanes: Trace) -> None:
    for trace in (cells, lanes):
        assert extra_cells(trace) == {0: 10, 1: 8, 2: 6, 3: 4}  # the last lone forward of each row
    ticks = cells.clock.ticks
    found = phases(cells, 0)
    assert (found.warm / ticks, found.cool / ticks) == (17, 32)
    for name in SCHEDULES:
        assert bool(extra_cells(trace_of(name))) == (name == "interleaved-overlap")
        for rank in range(4):
            found = phases(trace_of(name), rank)
            assert found.start <= found.warm <= found.cool <= found.end


def test_panels_show_their_kind_of_cell(lanes: Trace) -> None:
    copies = {"warmup": {"Offload"}, "steady": {"Offload", "Onload"}, "cooldown": {"Onload"}}
    for which in PHASES:
        boxes = cell_panel(lanes, which)
        assert [row.name for row in boxes.rows] == ["Computation", "Communication", "Offload"]
        says = set(boxes.says[0])
        assert says & {"Offload", "Onload"} == copies[which]
        assert {"Attn", "MLP", "EP-D", "EP-C", "PP"} <= says
        assert ("WGrad" in says) == (which != "warmup")
        cell = pick_cell(lanes, which, 2)
        copied = np.isin(lanes.program.kind[boxes.op], (OpKind.OFFLOAD, OpKind.ONLOAD))
        assert (lanes.program.cell[boxes.op[~copied]] == cell).all()
        begin, stop = boxes.left[~copied].min(), boxes.right[~copied].max()
        middle = (boxes.left + boxes.right)[copied] / 2
        assert ((begin <= middle) & (middle <= stop)).all()


def test_errors_say_the_way_out(cells: Trace, lanes: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.svg, \.png or \.pdf, got 'a\.gif'"):
        draw(cells, tmp_path / "a.gif")
    with pytest.raises(ValueError, match="`layers=N`"):
        draw(cells, tmp_path / "a.svg", FigureContent(grain="lanes"))
    with pytest.raises(ValueError, match="`layers=N`"):
        draw_cell(cells, "steady", tmp_path / "a.svg")
    with pytest.raises(ValueError, match="leave `layers` out"):
        draw(lanes, tmp_path / "a.svg", FigureContent(grain="cells"))
    with pytest.raises(ValueError, match="did you mean 'kimi'"):
        draw(cells, tmp_path / "a.svg", style=FigureStyle(palette="kimy"))
    with pytest.raises(ValueError, match="ranks go from 0 to 3, got 2 to 4"):
        draw(cells, tmp_path / "a.svg", FigureContent(ranks=range(2, 5)))
    with pytest.raises(ValueError, match="no overlapped cells"):
        draw_cell(trace_of("1f1b", DEEPSEEK, layers=1), "steady", tmp_path / "a.svg")
    with pytest.raises(ValueError, match="one unit of time, got unit, us"):
        draw([cells, trace_of("1f1b", DEEPSEEK)], tmp_path / "a.svg")
    with pytest.raises(ValueError, match="there is no folder"):
        draw(cells, tmp_path / "none" / "a.svg")
    with pytest.raises(ValueError, match="at least one trace, got none"):
        draw([], tmp_path / "a.svg")
    with pytest.raises(ValueError, match="leave `fold` out"):
        draw_cell(lanes, "steady", tmp_path / "a.svg", FigureStyle(fold=2))
    with pytest.raises(ValueError, match="warmup, steady, cooldown, got 'middle'"):
        draw_cell(lanes, "middle", tmp_path / "a.svg")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_window_shows_the_same_times_of_all_traces(lanes: Trace, tmp_path: Path) -> None:
    """One is slower: a window shows the same times of both, cut at its edges, and the box of an op at its own time."""
    whole = lane_boxes(lanes, range(2))
    window = (float(whole.right.max()) / 3, float(whole.right.max()) / 2)
    part = within(whole, window)
    assert 0 < len(part) < len(whole)
    assert part.left.min() == window[0]
    assert part.right.max() == window[1]
    inside = [k for k, op in enumerate(whole.op) if window[0] < whole.left[k] and whole.right[k] < window[1]]
    assert set(whole.op[inside]) <= set(part.op)
    slower = replace(lanes, start=lanes.start * 2, end=lanes.end * 2)
    content = FigureContent(ranks=range(2), window=window)
    draw([lanes, slower], tmp_path / "part.svg", content, names=["predicted", "measured"])
    with pytest.raises(ValueError, match="a window is from a time to a later one"):
        draw(lanes, tmp_path / "x.png", FigureContent(window=(3, 2)))
    with pytest.raises(ValueError, match="nothing happens at"):
        draw(lanes, tmp_path / "x.png", FigureContent(window=(1e9, 2e9)))


def test_strips_cover_the_time_once(cells: Trace) -> None:
    boxes = cell_boxes(cells, range(4))
    end = float(boxes.right.max())
    for count in (1, 2, 3, 7):
        parts = strips((0.0, end), count, cells.clock)
        assert len(parts) == count
        assert parts[0][0] == 0
        assert parts[-1][1] == end
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        cut = [within(boxes, part) for part in parts]
        assert sum(float((each.right - each.left).sum()) for each in cut) == pytest.approx(
            float((boxes.right - boxes.left).sum())
        )
        assert {int(op) for each in cut for op in each.op} == set(map(int, boxes.op))
    halves = strips((0.0, end), 2, DEEPSEEK.clock)  # real time is cut where it is cut
    assert halves[0][1] == end / 2


def test_memory_of_a_strip_begins_with_what_is_held(cells: Trace) -> None:
    (curve,) = held(cells, range(1), memory_unit(cells))
    for first, last in ((0.0, 5.0), (5.0, 20.0), (20.0, 60.0)):
        part = held_within(curve, (first, last))
        assert (part.time[0], part.time[-1]) == (first, last)
        for time, size in zip(part.time, part.size, strict=True):
            before = np.searchsorted(curve.time, min(time, last - 1e-9), side="right") - 1
            assert size == curve.size[before]


@pytest.mark.slow
def test_a_figure_has_the_width_and_the_letters_it_was_asked_for(cells: Trace, tmp_path: Path) -> None:
    for name, inches in WIDTHS.items():
        saved = draw(cells, tmp_path / f"{name}.svg", style=FigureStyle(width=name))
        assert saved.width_in == pytest.approx(inches)
    assert draw(cells, tmp_path / "a.pdf", style=FigureStyle(width="4.5")).width_in == pytest.approx(4.5)
    for style, points in ((FigureStyle(), 8.0), (FigureStyle(width=12, font_size=11), 11.0)):
        sheet = sheet_of([cells], style=style)
        assert {text.get_fontsize() for text in sheet.axes.texts if text.get_text() == "Device 0"} == {points}
    for name, inches in WIDTHS.items():
        named = FigureStyle(width=name)
        for same in (FigureStyle(width=inches), FigureStyle(width=str(inches)), FigureStyle(width=f"{inches}in")):
            assert (same.scale, same.tallest, same.layout_width) == (named.scale, named.tallest, named.layout_width)
    for text in sheet_of([cells], style=FigureStyle(width="column")).axes.texts:
        assert float(text.get_fontsize()) >= LEAST_PT


def test_small_schedules_in_a_column_are_one_strip() -> None:
    names = ["gpipe", "1f1b", "zb-h1"]
    sheet = sheet_of([trace_of(name) for name in names], style=FigureStyle(width=3.3), names=names)
    assert [text.get_text() for text in sheet.axes.texts].count("zb-h1") == 1
    assert {text for text, _, _ in sheet._glyphs} == {str(mb) for mb in range(8)}, "all of them can be read"


@pytest.mark.parametrize("width", ["column", "text", None])
def test_a_bracket_over_a_phase_has_its_name(width: str | None) -> None:
    sheet = sheet_of([trace_of("dualpipev")], style=FigureStyle(width=width))
    segments = [each.get_segments() for each in sheet.axes.collections if isinstance(each, LineCollection)]
    brackets = [found for found in segments if len(found) == 1 and len(found[0]) == 4]
    names = [text for text in sheet.axes.texts if text.get_text() in ("warm-up", "steady", "cool-down")]
    assert len(brackets) == len(names)


def test_a_png_is_as_large_as_it_says(cells: Trace, tmp_path: Path) -> None:
    saved = draw(cells, tmp_path / "a.png", style=FigureStyle(width="column"))
    header = (tmp_path / "a.png").read_bytes()[16:24]
    assert saved.pixels == (int.from_bytes(header[:4]), int.from_bytes(header[4:]))
    assert str(saved) == f"{saved.pixels[0]}x{saved.pixels[1]} pixels"


def test_a_long_step_is_folded_until_its_labels_fit(tmp_path: Path) -> None:
    """Without options a figure is 10 inches wide at most, in strips; --fold 1 is one strip, as wide as it needs."""
    schedule = treadle.generate("zb-v", pp=8, microbatches=32)
    trace = treadle.simulate(treadle.lower(schedule, UNIT_COSTS), UNIT_COSTS)
    folded, flat = sheet_of([trace]), sheet_of([trace], style=FigureStyle(fold=1))
    assert folded.width <= 720
    assert flat.width > 2000
    assert folded.y > 3 * flat.y
    many = sheet_of([trace], style=FigureStyle(fold=6))
    names = [text.get_text() for text in many.axes.texts]
    assert names.count("Device 0") == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": "wide"}, r"column \(3.3 in\), .* or 1.5 to 100 inches, got 'wide'"),
        ({"width": 0.1}, "1.5 to 100 inches, got 0.1"),
        ({"fold": 0}, "1 to 100 strips of time, got 0"),
        ({"font_size": 1}, "3 to 72 points high, got 1"),
    ],
)
def test_sizes_that_make_no_figure(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FigureStyle(**options)


def test_names_that_leave_no_room_for_time(lanes: Trace) -> None:
    with pytest.raises(ValueError, match=r"need \d\.\d inches at this size of letters, got 2.00"):
        sheet_of([lanes], style=FigureStyle(width=2, font_size=16))


def test_titles(cells: Trace) -> None:
    def bold(style: FigureStyle) -> list[str]:
        texts = sheet_of([cells], style=style).axes.texts
        return [text.get_text() for text in texts if text.get_fontweight() == "bold"]

    assert bold(FigureStyle()) == ["4 devices, 2 chunks each, 8 micro-batches"]
    assert bold(FigureStyle(title="mine")) == ["mine"]
    assert bold(FigureStyle(title="")) == []
    assert len(bold(FigureStyle(width="column", title="a title that is much too long for one line of a column"))) == 2


def test_some_ranks_alone(cells: Trace, tmp_path: Path) -> None:
    boxes = cell_boxes(cells, range(1, 3))
    assert [row.name for row in boxes.rows] == ["Device 1", "Device 2"]
    assert set(boxes.row) == {0, 1}
    draw(cells, tmp_path / "a.svg", FigureContent(ranks=range(1, 3), memory=True))


@pytest.mark.slow
def test_all_that_is_written_is_on_the_sheet(cells: Trace, lanes: Trace, tmp_path: Path) -> None:
    """No text, box or line leaves the sheet, and no two texts outside of boxes cover each other."""
    narrow, slide = FigureStyle(width="column"), FigureStyle(width="slide")
    both = FigureContent(memory=True)
    two, dualpipe = [cells, trace_of("zb-v")], trace_of("dualpipe", pp=8)
    sheets = [
        *(sheet_of([trace], both, style) for trace in (cells, lanes) for style in (FigureStyle(), narrow, slide)),
        *(sheet_of(two, both, style, names=["one", "two"]) for style in (FigureStyle(), narrow, FigureStyle(fold=3))),
        sheet_of([dualpipe], style=FigureStyle(palette="dualpipe")),
        *(cell_sheet(lanes, which, style) for which in PANEL_NAMES for style in (FigureStyle(), narrow)),
    ]
    for number, sheet in enumerate(sheets):
        sheet.save(tmp_path / f"{number}.png")
        check_texts(sheet)


def test_treadle_alone_does_not_load_matplotlib() -> None:
    code = "import sys, treadle, treadle.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_legend_names_what_is_drawn(lanes: Trace) -> None:
    def legend(window: tuple[float, float] | None) -> list[str]:
        return [text.get_text() for text in sheet_of([lanes], FigureContent(window=window)).axes.texts]

    assert "Extra warm-up forward" in legend(None)
    end = lanes.makespan / lanes.clock.ticks
    cut = legend((0.9 * end, end))
    assert "Extra warm-up forward" not in cut
    assert "Forward" not in cut
    assert "Backward" in cut
