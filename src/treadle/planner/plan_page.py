"""A plan as one HTML file that works without a network or a script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from treadle.estimate.cluster import GIB
from treadle.folding.stragglers import QUANTILES, StragglerStudy
from treadle.ir.blocks import write_layout
from treadle.ir.show import show_time
from treadle.planner.job_estimate import Alternative, JobEstimate, describe
from treadle.planner.plan_report import commands, count_text, study_text
from treadle.planner.planned_step import PlannedStep
from treadle.planner.ranked_search import SearchResult
from treadle.view.template import fill_template

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 330, 54, 40
_TICKS = 6


def page(
    found: SearchResult,
    chosen: PlannedStep,
    others: Sequence[Alternative],
    study: StragglerStudy | None = None,
    directory: Path = Path("plan"),
) -> str:
    """Return the HTML of a plan; its commands take the files of `directory`."""
    job = chosen.estimate.job
    assert job.layout is not None
    parts = {
        "title": escape(f"{job.model.name} on {job.cluster.name}"),
        "head": escape(describe(job)),
        "count": escape(count_text(found)),
        "figures": _figures(chosen, found.memory_limit),
        "front": _scatter(found),
        "memory": _memory(chosen, found.memory_limit),
        "others": _alternatives(others),
        "jobs": _jobs(found.front),
        "stragglers": _study(study) if study is not None else "",
        "layout": escape(write_layout(job.layout)),
        "directory": escape(str(directory)),
        "commands": escape("\n".join(commands(chosen, directory))),
    }
    return fill_template("treadle.planner", parts)


def _figures(chosen: PlannedStep, limit: int) -> str:
    job = chosen.estimate.job
    figures = (
        (f"{chosen.step_s:.3f} s", "a step"),
        (f"{job.global_batch_size * job.seq_len:,}", f"tokens: {job.global_batch_size:,} sequences of {job.seq_len:,}"),
        (f"{chosen.tokens_per_s_per_gpu:,.0f}", "tokens/s/GPU"),
        (f"{chosen.days(10**12):,.1f} days", f"for 10^12 tokens, {chosen.gpu_hours(10**12):,.0f} GPU-hours"),
        (f"{chosen.mfu:.1%}", f"MFU in {job.precision}"),
        (f"{chosen.metrics.idle_share:.1%}", "idle, mean over ranks"),
        (f"{chosen.exposed_share:.1%}", "exposed communication"),
        (f"{chosen.estimate.memory_bytes / GIB:.1f} GiB", f"memory of {limit / GIB:.1f}"),
        (str(job.num_microbatches), "micro-batches a replica"),
        ("clean" if chosen.report.clean else "findings", "verified"),
    )
    return "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in figures)


def _scatter(found: SearchResult) -> str:
    """Return the simulated jobs as dots over step time and memory, the front as a line."""
    timed = [each for each in found.fitting if each.ticks is not None]
    slowest = min(max(each.step_s for each in timed), 4 * found.best.step_s)
    across = _Axis(found.best.step_s, slowest, _LEFT, _WIDTH - 12)
    least = min(each.memory_bytes for each in timed) / GIB
    up = _Axis(least, found.memory_limit / GIB, _HEIGHT - _BOTTOM, 14)

    def place(each: JobEstimate) -> tuple[float, float]:
        return across.at(each.step_s), up.at(each.memory_bytes / GIB)

    dots = [place(each) for each in timed if each.step_s <= slowest]
    shown = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in sorted(set(dots)))
    front = [each for each in found.front if each.step_s <= slowest]
    places = [place(each) for each in front]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _staircase(places))
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{_hover(each)}</title></circle>'
        for each, (x, y) in zip(front, places, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="step time and memory of all simulated jobs">'
        f"{_axes(across, up)}<g class='dots'>{shown}</g><polyline points='{line}'/><g class='front'>{marks}</g></svg>"
    )


def _staircase(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners between places from left to right: a job's memory, until a slower one takes less."""
    corners = [(right[0], left[1]) for left, right in pairwise(places)]
    return [*places[:1], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]


class _Axis:
    """A linear axis from `low` at `start` to `high` at `stop`, widened to round numbers."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        span = max(high - low, 1e-9 * max(1.0, high), 1e-12)
        raw = span / (_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(raw))
        self.step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
        self.low = math.floor(low / self.step) * self.step
        self.high = math.ceil(high / self.step) * self.step
        self.start, self.stop = start, stop

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        return [self.low + number * self.step for number in range(round((self.high - self.low) / self.step) + 1)]


def _axes(across: _Axis, up: _Axis) -> str:
    foot = _HEIGHT - _BOTTOM
    made = [
        f'<text x="{across.at(value):.1f}" y="{foot + 16}" text-anchor="middle">{value:g}</text>'
        for value in across.ticks
    ]
    for value in up.ticks:
        y = up.at(value)
        made.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 12}" y2="{y:.1f}"/>')
        made.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    made.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step, s</text>')
    made.append(f'<text x="12" y="{foot / 2:.0f}" transform="rotate(-90 12 {foot / 2:.0f})">GiB</text>')
    return "".join(made)


def _hover(each: JobEstimate) -> str:
    return escape(f"{describe(each.job)}: {each.step_s:.3f} s, {each.memory_bytes / GIB:.1f} GiB")


def _memory(chosen: PlannedStep, limit: int) -> str:
    """Return the ranks' memory as bars of parts."""
    memory = chosen.estimate.memory
    names = memory[0]._fields
    most = max(limit, chosen.estimate.memory_bytes)
    key = "".join(f'<span><i class="{name}"></i>{name}</span>' for name in names)
    rows = []
    for rank, held in enumerate(memory):
        bar = "".join(
            f'<i class="{name}" style="width:{size / most * 100:.2f}%" title="{name}: {size / GIB:.2f} GiB"></i>'
            for name, size in zip(names, held, strict=True)
        )
        rows.append(f'<tr><th>{rank}</th><td class="stack">{bar}</td><td>{held.total / GIB:.1f}</td></tr>')
    return f'<div class="key">{key}</div><table class="ranks">{"".join(rows)}</table>'


def _alternatives(others: Iterable[Alternative]) -> str:
    rows = [
        f"<tr><td>{escape(other.knob)}</td><td>{escape(other.value)}</td>"
        f"<td>{f'+{other.slower:.1%}' if other.slower is not None else ''}</td>"
        f"<td>{f'{other.estimate.memory_bytes / GIB:.1f} GiB' if other.fits else ''}</td>"
        f"<td class='words'>{escape(other.reason)}</td></tr>"
        for other in others
    ]
    head = "<tr><th>knob</th><th>value</th><th>step</th><th>memory</th><th></th></tr>"
    return f'<table class="rows">{head}{"".join(rows)}</table>'


def _jobs(front: Iterable[JobEstimate]) -> str:
    rows = [
        f"<tr><td class='words'>{escape(describe(each.job))}</td><td>{each.step_s:.3f} s</td>"
        f"<td>{each.memory_bytes / GIB:.1f} GiB</td></tr>"
        for each in front
    ]
    return f'<table class="rows"><tr><th>job</th><th>step</th><th>memory</th></tr>{"".join(rows)}</table>'


def _study(study: StragglerStudy) -> str:
    rows = [
        f"<tr><td>{escape(row.name)}</td>"
        + "".join(f"<td>{escape(show_time(row.clock, ticks))}</td>" for ticks in (row.base, row.median))
        + "".join(f"<td>+{row.slowdown(share):.1%}</td>" for share in QUANTILES.values())
        + "</tr>"
        for row in study.rows
    ]
    head = "".join(f"<th>{name}</th>" for name in ("schedule", "step without", "median with", *QUANTILES))
    title = escape(f"{study.stragglers}, {study.num_draws} draws: {study_text(study)}")
    return f'<section class="wide"><h2>{title}</h2><table class="rows"><tr>{head}</tr>{"".join(rows)}</table></section>'
