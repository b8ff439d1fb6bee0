"""The page in a real browser: what it shows at the right place, what it asks for (nothing), and how fast it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import treadle
from tests.support.browser import MISSING, Browser, browser, speed
from treadle.costs import durations
from treadle.ir.execute import Times, execute
from treadle.ir.memory import peaks
from treadle.ir.ops import OpKind
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.simulator import critical_path
from treadle.view.page import MOST_OPS, page
from treadle.view.page.packed_columns import column

needs_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

COSTS = treadle.load_costs("deepseek-v3-h800")
UNIT = treadle.load_costs("unit")


@dataclass(frozen=True)
class Opened:
    """A page in the browser, and the traces it was made of."""

    window: Browser
    traces: list[Trace]

    def state(self) -> dict[str, Any]:
        return dict(self.window.js("treadle.state()"))

    def mouse(self, x: float, y: float, *, click: bool = False) -> None:
        chain = ActionChains(self.window.driver, duration=0)
        chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))  # type: ignore[no-untyped-call]
        if click:
            chain.w3c_actions.pointer_action.click()
        chain.perform()

    def point(self, op: int, trace: int = 0, *, click: bool = False) -> None:
        """Zooms in until the op is wide, and puts the mouse on it."""
        at = self.traces[trace]
        origin, dur = int(at.start.min()), int(at.end[op] - at.start[op])
        start = int(at.start[op]) - origin
        self.window.js("treadle.show(arguments[0], arguments[1])", start - 3 * dur, start + 4 * dur)
        self.window.js("treadle.find(arguments[0], arguments[1])", trace, op)
        box = self.window.js("treadle.positionOf(arguments[0], arguments[1])", trace, op)
        assert box is not None
        found = self.window.js("treadle.boxAt(arguments[0], arguments[1])", box["x"], box["y"])
        assert found == {"trace": trace, "op": op}
        self.mouse(box["x"], box["y"], click=click)

    def press(self, key: str) -> None:
        ActionChains(self.window.driver).send_keys(key).perform()

    def button(self, name: str) -> None:
        self.window.driver.find_element("id", name).click()

    def tooltip(self) -> dict[str, str]:
        """Its lines, by name; the title under "op"."""
        names = self.window.js("[...document.querySelectorAll('#tooltip dt')].map((e) => e.textContent)")
        texts = self.window.js("[...document.querySelectorAll('#tooltip dd')].map((e) => e.textContent)")
        title = self.window.js("document.querySelector('#tooltip b').textContent")
        return {"op": title, **dict(zip(names, texts, strict=True))}

    def tooltip_shown(self) -> bool:
        return bool(self.window.js("getComputedStyle(document.getElementById('tooltip')).display !== 'none'"))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _name(kind: OpKind) -> str:
    return kind.name.lower()


@cache
def layers() -> Trace:
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=8)
    return treadle.simulate(
        treadle.lower(schedule, COSTS, treadle.LoweringOptions(layers=2, offload=True, moe=True)), COSTS
    )


def cells(name: str, pp: int, microbatches: int) -> Trace:
    schedule = treadle.generate(name, pp=pp, microbatches=microbatches)
    return treadle.simulate(treadle.lower(schedule, UNIT, treadle.LoweringOptions()), UNIT)


def jittered(trace: Trace) -> Trace:
    """As if measured: every op takes up to a tenth longer, and the clock does not begin at 0."""
    rng = np.random.default_rng(7)
    dur = durations(trace.program, COSTS) * (1 + 0.1 * rng.random(trace.program.num_ops))
    times = execute(trace.program, dur.astype(np.int64))
    start, end = times.start + 10**12, times.end + 10**12
    return replace(trace, start=start, end=end, about="measured on nothing", measured=True)


def jittered_layers() -> Trace:
    return jittered(layers())


def opened(window: Browser, tmp_path: Path, *traces: Trace) -> Opened:
    path = tmp_path / "page.html"
    path.write_text(page([(f"trace {i}", trace) for i, trace in enumerate(traces)]), encoding="utf-8")
    window.open(path)
    return Opened(window, list(traces))


def first_op(program: Program, kind: OpKind, *, skip: int = 3) -> int:
    return int(np.flatnonzero(program.kind == kind)[skip])


def halves(program: Program, op: int) -> range:
    """The ops that start and end together with this one on its lane."""
    first, after = op, op + 1
    stop = program.lane_ptr[program.lane_of[op] + 1]
    while program.joined[first]:
        first -= 1
    while after < stop and program.joined[after]:
        after += 1
    return range(first, after)


def waits_for(program: Program, op: int) -> set[int]:
    """Dependencies, the op before on the lane, and what goes together with it."""
    mine = halves(program, op)
    lane = int(program.lane_of[op])
    found = {dep for half in mine for dep in program.deps(half)} | set(mine) - {op}
    if mine[0] > program.lane_ptr[lane]:
        found.add(mine[0] - 1)
    group = program.lane_group[lane]
    others = [int(other) for other in np.flatnonzero(program.lane_group == group)] if group >= 0 else []
    return found | {int(program.lane_ptr[other] + op - program.lane_ptr[lane]) for other in others if other != lane}


def waiters(program: Program, op: int) -> set[int]:
    """What depends on it, and the op after it on the lane."""
    mine = halves(program, op)
    reader = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    found = {int(r) for r in reader[np.isin(program.dep, list(mine))]}
    return found | ({mine[-1] + 1} if mine[-1] + 1 < program.lane_ptr[program.lane_of[op] + 1] else set())


@pytest.mark.slow
@needs_browser
def test_nothing_leaves_the_page_and_nothing_goes_wrong(window: Browser, tmp_path: Path) -> None:
    window.requests()
    window.complaints()
    shown = opened(window, tmp_path, layers())
    shown.point(first_op(shown.traces[0].program, OpKind.MLP_B), click=True)
    for name in ("path", "fold", "fit"):
        shown.button(name)
    assert window.js("performance.getEntriesByType('resource').length") == 0
    assert window.requests() == []
    assert window.complaints() == []


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    "kind", [OpKind.ATTN_F, OpKind.MLP_B, OpKind.DISPATCH_F, OpKind.SEND_F, OpKind.RECV_B, OpKind.ONLOAD], ids=_name
)
def test_hovering_says_what_an_op_is(window: Browser, tmp_path: Path, kind: OpKind) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    index = first_op(trace.program, kind)
    op, show = trace.program.op(index), trace.clock.show
    shown.point(index)
    said = shown.tooltip()
    assert shown.tooltip_shown()
    assert said["op"] == str(op)
    assert (said["rank"], said["lane"]) == (str(op.lane.rank), op.lane.name)
    assert (said["micro-batch"], said["chunk"]) == (str(op.mb), str(op.chunk))
    assert said.get("layer", "-1") == str(op.layer)
    assert said["start"] == f"{show(trace.start[index]):,} {trace.clock.unit}"
    assert said["duration"] == f"{show(trace.end[index] - trace.start[index]):,} {trace.clock.unit}"
    assert ("bytes" in said) == bool(trace.program.size_bytes[index])
    shown.mouse(300, 20)
    assert not shown.tooltip_shown()


@pytest.mark.slow
@needs_browser
def test_what_an_op_waited_for_is_the_cause_on_the_critical_path(window: Browser, tmp_path: Path) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    path = critical_path(trace)
    steps = [(before, op) for before, op in pairwise(path) if trace.end[op] > trace.start[op]]
    for before, op in steps[::20]:
        shown.point(op)
        cause = trace.program.op(before)
        assert shown.tooltip()["waited for"] == f"{cause}, {cause.lane}"
    shown.point(path[0])
    assert shown.tooltip()["waited for"] == "nothing"


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    "kind", [OpKind.ATTN_F, OpKind.MLP_B, OpKind.COMBINE_F, OpKind.SEND_B, OpKind.RECV_F], ids=_name
)
def test_a_click_lights_up_what_waits_for_what(window: Browser, tmp_path: Path, kind: OpKind) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    op = first_op(trace.program, kind)
    shown.point(op, click=True)
    state = shown.state()
    assert state["selected"]["op"] == op
    assert set(state["selected"]["waits"]) == waits_for(trace.program, op)
    assert set(state["selected"]["waiters"]) == waiters(trace.program, op)
    assert set(state["lit"][0]) == {op} | waits_for(trace.program, op) | waiters(trace.program, op)
    shown.press(Keys.ESCAPE)
    assert shown.state()["lit"] is None


@needs_browser
def test_arrows_lead_from_what_an_op_waits_for(window: Browser, tmp_path: Path) -> None:
    """Where messages take no time and have no row, they lead from the action that made one to the action that reads."""
    trace = cells("zb-h1", 4, 8)
    shown = opened(window, tmp_path, trace)
    program = trace.program

    def named(op: int) -> tuple[int, str]:
        return program.op(op).lane.rank, str(program.op(op))

    forward = next(op for op in range(program.num_ops) if named(op) == (2, "F4.0"))
    shown.point(forward, click=True)
    state = shown.state()
    arrows = {(named(start), named(stop), why) for start, stop, why in state["links"][0]}
    assert ((1, "F4.0"), (2, "F4.0"), "waits") in arrows
    assert ((2, "F4.0"), (3, "F4.0"), "waiters") in arrows
    assert {op for start, stop, _ in state["links"][0] for op in (start, stop)} <= set(state["lit"][0])
    shown.press(Keys.ESCAPE)
    assert shown.state()["links"] == [[]]
    shown.button("path")
    on_path = set(critical_path(trace))
    for start, stop, _ in shown.state()["links"][0]:
        assert {start, stop} <= on_path
        assert program.lane_of[start] != program.lane_of[stop]


_TOUCH = """(() => {
  const plot = document.getElementById("plot"), box = plot.getBoundingClientRect();
  const touch = ([x, y], identifier) => new Touch({ identifier, target: plot, clientX: x, clientY: y });
  const send = (type, points) => plot.dispatchEvent(new TouchEvent(type,
    { touches: points.map(touch), cancelable: true, bubbles: true }));
  for (const points of arguments[0]) send(points === arguments[0][0] ? "touchstart" : "touchmove", points);
  send("touchend", []);
})()"""


@needs_browser
def test_fingers_tap_drag_and_pinch(window: Browser, tmp_path: Path) -> None:
    shown = opened(window, tmp_path, layers())
    op = first_op(shown.traces[0].program, OpKind.ATTN_B)
    shown.point(op)
    box = window.js("treadle.positionOf(0, arguments[0])", op)
    x, y = box["x"], box["y"]
    window.js(_TOUCH, [[[x, y]]])
    assert shown.state()["selected"]["op"] == op
    assert shown.tooltip_shown()
    window.js(_TOUCH, [[[x, y]], [[x - 60, y]], [[x - 120, y]]])
    assert abs(window.js("treadle.positionOf(0, arguments[0])", op)["x"] - x + 120) <= 2
    before = shown.state()
    window.js(_TOUCH, [[[x - 50, y], [x + 50, y]], [[x - 100, y], [x + 100, y]]])
    after = shown.state()
    assert math.isclose(after["to"] - after["from"], (before["to"] - before["from"]) / 2, rel_tol=0.01)
    assert after["selected"] == before["selected"]


@needs_browser
def test_a_page_is_not_blank_before_its_scripts_run(window: Browser, tmp_path: Path) -> None:
    """Without its scripts, as a browser paints it first, it has titles, ranks and boxes; the scripts replace them."""
    trace = cells("dualpipe", 4, 12)
    text = page([("dualpipe", trace)])
    (tmp_path / "still.html").write_text(re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL), "utf-8")
    window.driver.get((tmp_path / "still.html").as_uri())
    assert window.js("document.title") == "dualpipe: 4 devices, 2 chunks each, 12 micro-batches"
    assert "4 devices" in window.js("document.getElementById('titles').textContent")
    names = window.js("[...document.querySelectorAll('#preview span')].map((e) => e.textContent)")
    assert names == [f"rank {rank}" for rank in range(4)]
    drawn = window.js("[...document.querySelectorAll('#preview path')].map((e) => e.getBoundingClientRect().width)")
    assert len(drawn) >= 4
    assert max(drawn) > 500
    shown = opened(window, tmp_path, trace)
    assert window.js("document.getElementById('preview')") is None
    assert shown.state()["rows"] == [4]


@needs_browser
def test_a_click_beside_ops_clears(window: Browser, tmp_path: Path) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    op = first_op(trace.program, OpKind.ATTN_F, skip=0)
    shown.point(op, click=True)
    box = window.js("treadle.positionOf(0, arguments[0])", op)
    assert shown.state()["selected"] is not None
    shown.mouse(box["x"] - 2 * box["width"], box["y"], click=True)  # before the step began
    assert shown.state()["selected"] is None


@needs_browser
def test_the_halves_of_an_overlapped_cell_are_two_boxes(window: Browser, tmp_path: Path) -> None:
    trace = cells("dualpipe", 4, 12)
    shown = opened(window, tmp_path, trace)
    second = int(np.flatnonzero(trace.program.joined)[0])
    for op in (second - 1, second):
        shown.point(op, click=True)
        assert shown.tooltip()["op"] == str(trace.program.op(op))
        assert set(shown.state()["selected"]["waits"]) == waits_for(trace.program, op)
        assert set(shown.state()["selected"]["waiters"]) == waiters(trace.program, op)


@needs_browser
def test_the_critical_path(window: Browser, tmp_path: Path) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    shown.button("path")
    assert shown.state()["lit"] == [critical_path(trace)]
    assert "Critical path" in window.js("document.getElementById('details').textContent")
    shown.button("path")
    assert shown.state()["lit"] is None


@needs_browser
def test_folding(window: Browser, tmp_path: Path) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    every, ranks = shown.state()["rows"][0], trace.program.num_ranks
    of_rank = [int(np.count_nonzero(trace.program.lane_rank == rank)) for rank in range(ranks)]
    box = window.js("treadle.positionOf(0, arguments[0])", 0)
    shown.mouse(40, box["y"], click=True)  # the name of rank 0 is beside its compute lane
    assert shown.state()["folded"] == [0]
    assert every - of_rank[0] < shown.state()["rows"][0] < every
    shown.button("fold")
    assert shown.state()["rows"] == [ranks]
    message = first_op(trace.program, OpKind.SEND_F)
    assert window.js("treadle.positionOf(0, arguments[0])", message) is None
    shown.point(message)  # unfolds its rank
    assert len(shown.state()["folded"]) == ranks - 1
    shown.button("fold")
    shown.button("fold")
    assert shown.state()["rows"] == [every]


@needs_browser
def test_zoom_and_pan(window: Browser, tmp_path: Path) -> None:
    trace = layers()
    shown = opened(window, tmp_path, trace)
    whole = shown.state()
    assert whole["from"] <= 0
    assert whole["to"] >= trace.makespan
    wheel = "document.getElementById('plot').dispatchEvent(new WheelEvent('wheel', {deltaY: -300, clientX: 800}))"
    time_at = "(() => { const s = treadle.state(), b = document.getElementById('plot').getBoundingClientRect();"
    time_at += " return s.from + (800 - b.left - 148) / (b.width - 148) * (s.to - s.from); })()"
    under = window.js(time_at)
    window.js(wheel)
    zoomed = shown.state()
    assert zoomed["to"] - zoomed["from"] < 0.7 * (whole["to"] - whole["from"])
    assert math.isclose(window.js(time_at), under, rel_tol=1e-6)
    shown.press(Keys.ARROW_RIGHT)
    moved = shown.state()
    assert moved["from"] > zoomed["from"]
    assert math.isclose(moved["to"] - moved["from"], zoomed["to"] - zoomed["from"], rel_tol=1e-9)
    shown.press("+")
    assert shown.state()["to"] - shown.state()["from"] < moved["to"] - moved["from"]
    shown.press("0")
    assert shown.state()["from"] == whole["from"]
    assert shown.state()["to"] == whole["to"]


@needs_browser
def test_dragging_moves_what_is_under_the_mouse(window: Browser, tmp_path: Path) -> None:
    shown = opened(window, tmp_path, layers())
    op = first_op(shown.traces[0].program, OpKind.ATTN_B)
    shown.point(op)
    before = window.js("treadle.positionOf(0, arguments[0])", op)
    ActionChains(window.driver, duration=20).click_and_hold().move_by_offset(-120, 0).release().perform()
    after = window.js("treadle.positionOf(0, arguments[0])", op)
    assert abs(after["x"] - before["x"] + 120) <= 2
    assert shown.state()["selected"] is None  # it was no click


@needs_browser
def test_two_traces_share_the_time_axis(window: Browser, tmp_path: Path) -> None:
    predicted = layers()
    shown = opened(window, tmp_path, predicted, jittered(predicted))
    first, second = shown.traces
    op = first_op(predicted.program, OpKind.ATTN_B)
    middle = [float((t.start[op] + t.end[op]) / 2 - t.start.min()) for t in (first, second)]
    width = window.js("document.getElementById('plot').clientWidth") - 148
    for begin, end in ((0.0, float(second.makespan)), (0.9 * min(middle), 1.1 * max(middle))):
        window.js("treadle.show(arguments[0], arguments[1])", begin, end)
        places = [window.js("treadle.positionOf(arguments[0], arguments[1])", n, op) for n in (0, 1)]
        apart = (middle[1] - middle[0]) * width / (end - begin)
        assert abs(places[1]["x"] - places[0]["x"] - apart) <= 2
        assert places[0]["y"] < places[1]["y"]
    shown.point(op, 1, click=True)
    assert shown.state()["selected"]["trace"] == 1
    assert shown.state()["lit"][0] == []
    assert set(shown.state()["selected"]["waits"]) == waits_for(second.program, op)
    assert "trace 0" in window.js("document.getElementById('titles').textContent")
    assert "measured on nothing" in window.js("document.getElementById('titles').textContent")


def uneven() -> Trace:
    """Stages of 2, 2, 1, ... layers, which hold different amounts."""
    schedule = treadle.generate("interleaved", pp=4, microbatches=12)
    return treadle.simulate(treadle.lower(schedule, COSTS, treadle.LoweringOptions(model_layers=10)), COSTS)


@needs_browser
@pytest.mark.parametrize("name", ["layers", "jittered", "uneven", "dualpipe", "zb-v"])
def test_memory_and_totals_are_the_library_s(window: Browser, tmp_path: Path, name: str) -> None:
    made: dict[str, Callable[[], Trace]] = {"layers": layers, "jittered": jittered_layers, "uneven": uneven}
    trace = made.get(name, lambda: cells(name, 4, 12))()
    opened(window, tmp_path, trace)
    want = peaks(trace.program, Times(trace.start, trace.end))
    origin = int(trace.start.min())
    for rank in range(trace.program.num_ranks):
        held = window.js("treadle.memory(0, arguments[0])", rank)
        assert held == {"peak": int(want.size[rank]), "peakTime": int(want.time[rank]) - origin}
    metrics = treadle.measure(trace)
    rows = window.js("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))")
    assert [row[0] for row in rows] == [str(rank) for rank in range(trace.program.num_ranks)]
    assert [row[3] for row in rows] == [f"{100 * rank.idle_share:.1f}%" for rank in metrics.ranks]


@needs_browser
def test_names_are_text(window: Browser, tmp_path: Path) -> None:
    trace = replace(cells("1f1b", 2, 4), about="</script><script>alert(1)</script>")
    path = tmp_path / "page.html"
    path.write_text(page([("<b>bold</b><!--data-->", trace)]), encoding="utf-8")
    window.complaints()
    window.open(path)
    titles = window.js("document.getElementById('titles').textContent")
    assert "<b>bold</b><!--data-->" in titles
    assert "</script><script>alert(1)</script>" in titles
    assert window.complaints() == []


@cache
def large() -> Trace:
    schedule = treadle.generate("interleaved-overlap", pp=8, vpp=2, microbatches=256)
    return treadle.simulate(treadle.lower(schedule, COSTS, treadle.LoweringOptions(layers=4, moe=True)), COSTS)


@pytest.mark.slow
@needs_browser
def test_two_hundred_thousand_ops(window: Browser, tmp_path: Path) -> None:
    trace = large()
    assert trace.program.num_ops >= 200_000
    path = tmp_path / "large.html"
    path.write_text(page([("large", trace)]), encoding="utf-8")
    size_mb = path.stat().st_size / 1e6
    found = speed(window, path)  # how fast it is depends on other work on the machine
    print(f"{trace.program.num_ops:,} ops: {found}, {size_mb:.2f} MB")  # noqa: T201
    assert min(found.first_paint_s, found.pan_full_ms, found.pan_zoomed_ms) > 0
    assert size_mb < 6


@pytest.mark.slow
def test_times_that_all_differ_still_fit() -> None:
    assert len(page([("measured", jittered(large()))])) < 6e6


def test_traces_that_a_page_cannot_show() -> None:
    trace = cells("1f1b", 2, 4)
    with pytest.raises(ValueError, match="one trace or two, got 3"):
        page([("a", trace)] * 3)
    with pytest.raises(ValueError, match="one clock, but 'a' counts in unit and 'b' counts in us"):
        page([("a", trace), ("b", layers())])
    with pytest.raises(ValueError, match="did you mean 'kimi'"):
        page([("a", trace)], "kimy")
    program = trace.program
    many = replace(program, kind=np.zeros(MOST_OPS + 1, np.uint8))
    with pytest.raises(ValueError, match="a page takes up to 2,000,000 ops, got 2,000,001"):
        page([("a", replace(trace, program=many))])


def test_columns_are_in_the_narrowest_type() -> None:
    assert column(np.array([0, 255]))["type"] == "u1"
    assert column(np.array([0, 255]), differences=True)["type"] == "u1"
    assert column(np.array([200, 0]), differences=True)["type"] == "i2"
    assert column(np.array([0, 2**31]))["type"] == "f8"
    assert column(np.array([], np.int64), differences=True)["type"] == "u1"
