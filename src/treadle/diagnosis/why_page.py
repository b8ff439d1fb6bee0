"""A WhyReport as one HTML file that works without a network or a script."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from treadle.diagnosis.heat import Heat
from treadle.diagnosis.why_report import WhyReport
from treadle.ir.show import show_time
from treadle.view.template import fill_template


def page(report: WhyReport, name: str) -> str:
    """Return the HTML of a report; `name` is what was analysed."""
    sentence = report.cause.sentence
    parts = {
        "title": escape(f"why {name}"),
        "sentence": escape(sentence[:1].upper() + sentence[1:] + "."),
        "words": escape(f"{name}: {report.in_words}"),
        "figures": _figures(report),
        "shares": _bars(report.shares.items(), "{:.1%}", largest=max([0.1, *report.shares.values()])),
        "kinds": _kinds(report),
        "heat": _heat(report),
        "steps": _steps(report),
        "footer": escape(report.about),
    }
    return fill_template("treadle.diagnosis", parts)


def _figures(report: WhyReport) -> str:
    clock = report.clock
    figures = (
        (f"{report.slowdown:.3f}", "S, slowdown against the ideal step"),
        (show_time(clock, report.measured), "a step, measured"),
        (show_time(clock, report.no_gaps), "without gaps"),
        (show_time(clock, report.ideal), "ideal: every op at the mean or median of its type"),
        (f"{report.gaps:.1%}", "gaps"),
        (f"{report.messages:.1%}", "waiting for messages"),
        (f"{report.communication:.1%}", "exposed communication"),
        (f"{report.last_stage.removed:.3f}", "M_S, share of the lost time recovered by fixing the last stage"),
        (f"{report.slowest_workers.removed:.3f}", "M_W, the same for the slowest 3 % of workers"),
    )
    return "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in figures)


def _kinds(report: WhyReport) -> str:
    ordered = sorted(report.by_kind.items(), key=lambda item: -item[1])
    return _bars(ordered, "{:.4f}", origin=1.0, largest=max(ordered[0][1], 1.01) if ordered else 2.0)


def _bars(rows: Iterable[tuple[str, float]], form: str, *, origin: float = 0.0, largest: float) -> str:
    """Rows of a name, a value and a bar from `origin` on."""
    made = []
    for name, value in rows:
        width = min(100.0, max(0.0, (value - origin) / (largest - origin) * 100))
        bar = f'<i style="width:{width:.1f}%"></i>' if width else ""
        shown = form.format(value).replace("-0.0%", "0.0%")
        made.append(f"<tr><td>{escape(name)}</td><td>{escape(shown)}</td><td>{bar}</td></tr>")
    return f'<table class="bars">{"".join(made)}</table>'


def _heat(report: WhyReport) -> str:
    heat = Heat.of(report.workers)
    head = "".join(f"<th>rank {rank}</th>" for rank in range(report.pp))
    rows = []
    for dp, scores in enumerate(report.workers):
        cells = []
        for score in scores:
            fill, ink = heat.colours(score)
            cells.append(f'<td style="background:{fill};color:{ink}">{score:.3f}</td>')
        rows.append(f"<tr><th>dp {dp}</th>{''.join(cells)}</tr>")
    return f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _steps(report: WhyReport) -> str:
    if len(report.by_step) < 2:
        return ""
    highest = max(report.by_step.values())
    bars = "".join(
        f'<i style="height:{slowdown / highest * 100:.1f}%" title="step {number}: {slowdown:.3f}"></i>'
        for number, slowdown in report.by_step.items()
    )
    numbers = list(report.by_step)
    return (
        f"<h2>Slowdown of each step, {numbers[0]} to {numbers[-1]}; the highest is {highest:.3f}</h2>"
        f'<div class="steps">{bars}</div>'
    )
