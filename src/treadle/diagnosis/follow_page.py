"""A followed run as a page that reloads itself, and as metrics in Prometheus's text form."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from treadle.diagnosis.follow import STEP, FollowedStep

RELOAD_S = 5
_WIDTH, _HEIGHT = 960, 160
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } .on { background: #fdecea; border-left: 4px solid #c0392b; padding: .5em .8em }
.off { background: #eef7ee; border-left: 4px solid #2e7d32; padding: .5em .8em }
table { border-collapse: collapse; width: 100% } td, th { padding: .2em .8em .2em 0; text-align: left }
th { color: #777; font-weight: normal; border-bottom: 1px solid #ddd } td.n { font-variant-numeric: tabular-nums }
tr.high td { color: #c0392b } svg { width: 100%; height: auto } p.axis { color: #777; font-size: .85em; margin: 0 }
"""


def page(name: str, lines: Sequence[FollowedStep]) -> str:
    """Return the HTML of a run's last steps, the newest first."""
    alarms = lines[-1].alarms
    state = f'<p class="{"on" if alarms else "off"}">{escape("; ".join(map(str, alarms)) or "as before")}</p>'
    rows = "".join(_row(line) for line in reversed(lines))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{RELOAD_S}">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body><h1>{escape(name)}</h1>{state}"
        f"{_chart(lines)}<table><tr><th>step</th><th>time</th><th>slowdown</th><th>state</th><th>cause</th></tr>"
        f"{rows}</table></body></html>\n"
    )


def _row(line: FollowedStep) -> str:
    seen = line.observed
    state = "; ".join(map(str, line.alarms)) or "as before"
    kind = ' class="high"' if line.alarms else ""
    figures = (f"{seen.number:,}", f"{seen.seconds:.4g} s", f"{seen.slowdown:.3f}x")
    cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
    return f"<tr{kind}>{cells}<td>{escape(state)}</td><td>{escape(seen.cause)}</td></tr>"


def _chart(lines: Sequence[FollowedStep]) -> str:
    """Return the times of the steps as a line, from 0, with the steps of alarms as dots."""
    seconds = [line.observed.seconds for line in lines]
    most = max(seconds) or 1.0
    across = _WIDTH / max(len(lines) - 1, 1)
    points = [(at * across, _HEIGHT * (1 - value / most / 1.05)) for at, value in enumerate(seconds)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#c0392b"/>'
        for (x, y), line in zip(points, lines, strict=True)
        if line.alarms
    )
    first, last = lines[0].observed.number, lines[-1].observed.number
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}"><polyline points="{path}" fill="none" stroke="#3465a4" '
        f'stroke-width="1.5"/>{dots}</svg><p class="axis">step {first:,} to {last:,}, 0 to {most:.4g} s</p>'
    )


def metrics(line: FollowedStep) -> str:
    """Return the metrics of a step, in Prometheus's text form.

    Example:
        >>> from treadle.diagnosis.follow import Alarm, Observed
        >>> seen = Observed(12, 2.5, 1.25, "a cause", {})
        >>> print(metrics(FollowedStep(seen, (Alarm("rank 3", 11, 0.5),))).splitlines()[-1])
        treadle_slower_ratio{what="rank 3",since="11"} 0.5

    """
    seen = line.observed
    text = [
        *_gauge("treadle_step", "The last step that was read.", [("", seen.number)]),
        *_gauge("treadle_step_seconds", "From its begin to its end.", [("", seen.seconds)]),
        *_gauge("treadle_slowdown_ratio", "Over a step of ordinary ops.", [("", seen.slowdown)]),
        *_gauge("treadle_alarms", "Workers, or the step, that are slower than before.", [("", len(line.alarms))]),
        *_gauge(
            "treadle_slower_ratio",
            f"How much slower than before; {STEP} is the whole step.",
            [(f'{{what="{alarm.what}",since="{alarm.since}"}}', alarm.rise) for alarm in line.alarms],
        ),
    ]
    return "\n".join(text) + "\n"


def _gauge(name: str, about: str, rows: Sequence[tuple[str, float]]) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} gauge", *(f"{name}{labels} {value:g}" for labels, value in rows)]
