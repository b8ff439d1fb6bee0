"""The page of a plan: its figures are those of `--json`, and it is one valid file for screens, phones and paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.support.browser import MISSING, Browser, browser
from treadle.estimate.cluster import GIB
from treadle.planner import SearchResult, SearchSpace, find_plan
from treadle.planner.plan_page import page
from treadle.planner.plan_report import plan_object
from treadle.planner.planned_step import PlannedStep
from treadle.planner.printed_plan import PlanJson
from treadle.planner.run_errors import run_errors
from treadle.view.palette import Look, told_apart

pytestmark = pytest.mark.slow

LIMIT = 60 << 30
SPACE = SearchSpace(tp=(2,), pp=(2,), schedules=("1f1b", "zb-h1"), micro_batch_size=(1,), balanced=(True,))
LONG = SearchSpace(tp=(2,), pp=(64,), schedules=("1f1b",), micro_batch_size=(1,), recompute=((),), balanced=(True,))
VOID = ("meta", "link", "br")


class Made(NamedTuple):
    """A plan, and its page."""

    found: SearchResult
    chosen: PlannedStep
    html: str

    @property
    def json(self) -> PlanJson:
        return plan_object(self.found, self.chosen, self.found.alternatives)


def make(model: str, cluster: str, space: SearchSpace, limit: int | None, tokens: int | None = None) -> Made:
    found = find_plan(model, cluster, space=space, memory_limit=limit, tokens_per_batch=tokens)
    chosen = PlannedStep.of(found.best)
    return Made(found, chosen, page(found, chosen, found.alternatives, directory=Path("my plan")))


@pytest.fixture(scope="module")
def made() -> Made:
    return make("llama3-8b", "h100:16", SPACE, LIMIT)


@pytest.fixture(scope="module")
def long() -> Made:
    """A pipeline of 64 ranks whose memory differs from rank to rank."""
    return make("gpt3-175b", "h100:1024", LONG, None, 1 << 21)


class Read(HTMLParser):
    """A page's text and tables; refuses tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.pairs: list[tuple[str, str]] = []
        self.text = ""
        self._cell = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        if tag in VOID:
            return
        if tag in ("p", "h1", "h2", "h3", "table", "section", "div", "ul", "pre"):  # none of these stands in a p
            assert "p" not in self.open, (tag, self.open)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            assert tag == "td" or dict(attrs).get("scope") in ("row", "col")
        if tag in ("th", "td", "dt", "dd"):
            self._cell = ""
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("th", "td"):
            self.tables[-1][-1].append(self._cell)
        elif tag in ("dt", "dd"):
            self.pairs += [(self._cell, "")] if tag == "dt" else [(self.pairs.pop()[0], self._cell)]

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
            self._cell += data


def test_figures_are_those_of_the_json(made: Made) -> None:
    shown, plan = dict(Read(made.html).pairs), made.json
    job, errors = plan["chosen"], run_errors(made.chosen.estimate.job)
    hours, days = job["run_gpu_hours"], job["run_days"]
    low, high = errors.low, errors.high
    step, speed, mfu = job["step_s"], job["tokens_per_s_per_gpu"], job["mfu"]
    assert shown["step"] == f"{step:.3f} s{step * low:.3g} to {step * high:.3g} s"
    assert shown["time for 1T tokens"] == f"{days:,.1f} days{days * low:,.1f} to {days * high:,.1f} days"
    assert shown["cost of 1T tokens"] == f"{hours:,.0f} GPU-hours{hours * low:,.0f} to {hours * high:,.0f}"
    assert shown["throughput"] == f"{speed:,.0f} tokens/s/GPU{speed / high:,.0f} to {speed / low:,.0f}"
    assert shown["MFU in bf16"] == f"{mfu:.1%} {mfu / high:.1%} to {mfu / low:.1%}"
    assert shown["memory"] == f"{job['memory_bytes'] / GIB:.1f} GiBof {plan['memory_limit_bytes'] / GIB:.1f} GiB a GPU"
    assert shown["batch"] == "524,288 tokens: 128 sequences of 4,096, in bf16"
    assert shown["idle"].startswith(f"{job['bubble']:.1%} ")
    assert shown["exposed communication"].startswith(f"{job['exposed_communication']:.1%} ")
    assert shown["verified"] == "clean"


def test_tables_are_those_of_the_json(made: Made) -> None:
    read, plan = Read(made.html), made.json
    tables = {tuple(table[0]): table[1:] for table in read.tables}  # the last of each kind: all alternatives
    memory = [[str(rank), *(f"{part / GIB:.1f}" for part in held.values())] for rank, held in enumerate(_held(plan))]
    (ranks,) = (rows for head, rows in tables.items() if head[0] == "rank")
    assert [row[:-1] for row in ranks] == memory
    changes = tables["change", "step against the choice", "", "memory", "where it goes"]
    assert [(row[0], row[2]) for row in changes] == [
        (f"{each['knob'].replace('_', ' ')} {each['value']}", f"{each['slower']:+.1%}" if each["fits"] else "")
        for each in plan["alternatives"]
    ]
    jobs = [row for table in read.tables if table[0][:2] == ["job", "step"] for row in table[1:]]
    front = [(f"{each['step_s']:.3f} s", f"{each['memory_bytes'] / GIB:.1f} GiB") for each in plan["front"]]
    assert set(front) <= {(row[1], row[2]) for row in jobs}
    assert plan["chosen"]["layout"] in read.text


def _held(plan: PlanJson) -> Iterator[dict[str, int]]:
    for held in plan["chosen"]["memory"]:
        yield {name: int(size) for name, size in held.items()}  # type: ignore[call-overload]


def test_bars_of_memory_are_as_long_as_the_parts(made: Made, long: Made) -> None:
    for each in (made, long):
        whole = each.chosen.estimate.job.cluster.memory_bytes
        rows = re.findall('<span class="space stack">(.*?)</span>', each.html)
        assert len(rows) == len(set(each.chosen.estimate.memory))
        for row, held in zip(rows, dict.fromkeys(each.chosen.estimate.memory), strict=True):
            sizes = {name: float(size) for name, size in re.findall('class="([a-z]+)" style="width:([0-9.]+)%', row)}
            assert sizes == {
                name: pytest.approx(part / whole * 100, abs=0.006)
                for name, part in zip(held._fields, held, strict=True)
                if part
            }


def test_the_fastest_stands_beside_the_choice(made: Made) -> None:
    """Within its error the estimate does not rank: ZB-H1 gives way to 1F1B, which more trainers run."""
    rows = [table[1:] for table in Read(made.html).tables if table[0][:2] == ["", "job"]]
    plan = made.json
    beside = {"chosen": plan["chosen"], "fastest": plan["fastest"]} if plan["reason"] else {}
    assert [[row[0], *row[2:]] for table in rows for row in table] == [
        [name, f"{each['step_s']:.3f} s", f"{each['memory_bytes'] / GIB:.1f} GiB"] for name, each in beside.items()
    ]
    assert (plan["reason"] or "the fastest job that fits") in Read(made.html).text


def test_thin_bars_leave_out_names_that_would_overlap(long: Made) -> None:
    names = re.findall(r'<div class="rank( fullest)?"><span>([0-9]*)</span>', long.html)
    assert len(names) == 64
    shown = [int(name) for _, name in names if name]
    fullest = [int(name) for most, name in names if most]
    assert set(shown) == {*range(0, 64, 8), 63, *fullest}


def test_front_is_a_staircase(made: Made) -> None:
    """Between two jobs nothing was found, so no line slopes from one to the other."""
    svg = ElementTree.fromstring(re.search('<svg class="scatter".*?</svg>', made.html, re.DOTALL)[0])  # type: ignore[index]
    line = svg.find("polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) > 3
    for (x, y), (next_x, next_y) in pairwise(points):
        assert (next_x >= x and next_y == y) or (next_x == x and next_y >= y)
    rings = svg.findall("g[@class='marked']/circle")
    at = {(dot.attrib["cx"], dot.attrib["cy"]) for dot in svg.findall("g[@class='dots']/circle")}
    assert {(ring.attrib["cx"], ring.attrib["cy"]) for ring in rings} <= at
    assert [name.text for name in svg.findall("g[@class='marked']/text")] == ["fastest", "chosen"]


def test_page_has_the_commands(made: Made) -> None:
    text = Read(made.html).text
    assert "treadle draw 'my plan'\n" in text
    assert "python -m treadle.train --config 'my plan/train.toml' --dry-run" not in text  # it has no TP
    assert "<!--" not in made.html


def test_page_asks_for_nothing_and_is_the_same_each_time(made: Made) -> None:
    assert re.findall("https?:|src=|@import|<script", made.html) == []
    assert re.findall(r'href="([^"]*)"|url\(([^)]*)\)', made.html) == [("data:,", "")]
    again = page(made.found, PlannedStep.of(made.found.best), made.found.alternatives, directory=Path("my plan"))
    assert again == made.html


def test_every_colour_has_a_value_by_day_and_by_night(made: Made) -> None:
    css = made.html.partition("</style>")[0]
    day, night = (_colours(css.partition("@media (prefers-color-scheme: dark)")[part]) for part in (0, 2))
    assert day.keys() == night.keys() == set(re.findall(r"var\(--([a-z]+)\)", css)) - {"row", "limit", "at"}
    assert re.findall("#[0-9a-f]{3,6}", css.rpartition("body {")[2]) == []
    parts = made.chosen.estimate.memory[0]._fields
    for name in parts:
        assert f".{name} {{ background: var(--{name}); " in css
    for colours in (day, night):
        for one, other in pairwise(parts):
            assert told_apart(Look(colours[one]), Look(colours[other])), (one, other)


def _colours(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", css))


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_labels_keep_clear_of_each_other(made: Made, long: Made, width: int, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as window:
        named = _renamed(made, "a-model-whose-name-" + "goes-on-and-on-" * 6)
        for name, html in (("made", made.html), ("long", long.html), ("named", named)):
            file = tmp_path / f"{name}.html"
            file.write_text(html, encoding="utf-8")
            _resize(window, width)
            window.driver.get(file.as_uri())
            assert window.js("document.documentElement.scrollWidth") <= width
            assert window.js(_OVERLAPS) == []
            assert window.requests() == []


def _renamed(made: Made, name: str) -> str:
    """Return the page for a model and a cluster of another name, with all of a layer's modules recomputed."""
    job = made.found.best.job
    modules = ("layernorm", "mla_up_proj", "moe_act", "shared_experts")
    model, cluster = replace(job.model, name=name), replace(job.cluster, name=name)
    best = replace(made.found.best, job=replace(job, model=model, cluster=cluster, recompute=modules))
    others = [replace(each, value="+".join(modules)) for each in made.found.alternatives]
    return page(replace(made.found, best=best, front=(best,)), replace(made.chosen, estimate=best), others)


def _resize(window: Browser, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    window.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


_OVERLAPS = """(() => {
  const seen = [...document.querySelectorAll("body *")].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility()
    && !e.closest("details") && !["title", "style"].includes(e.tagName.toLowerCase()));
  const boxes = seen.map((e) => {
    const range = document.createRange(); range.selectNodeContents(e);
    const box = e.closest("svg") ? e.getBoundingClientRect() : range.getBoundingClientRect();
    return { e, text: e.textContent.trim(), l: box.left, r: box.right, t: box.top, b: box.bottom };
  }).filter((box) => box.r > box.l);
  const found = [];
  for (const [i, one] of boxes.entries()) for (const other of boxes.slice(i + 1)) {
    if (one.e.contains(other.e) || other.e.contains(one.e)) continue;
    const across = Math.min(one.r, other.r) - Math.max(one.l, other.l);
    const down = Math.min(one.b, other.b) - Math.max(one.t, other.t);
    if (across > 1 && down > 4) found.push(`${one.text} / ${other.text}`);
  }
  return found;
})()"""
