"""Bars of a plan's page in HTML, whose letters keep their size on a phone: memory by rank, and alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from treadle.estimate.cluster import GIB
from treadle.estimate.job_memory import MemoryEstimate
from treadle.planner.job_estimate import Alternative
from treadle.planner.planned_step import PlannedStep

_TALL_ROWS, _ROWS = 16, 32
"""Bars that are as high as a line of text, and those that still have a name each."""
_NAMED_EVERY = 8
_LONGEST = 1.0
"""Share by which a step is longer whose bar fills the chart; longer ones are cut off."""


class RankGroup(NamedTuple):
    """Ranks in a row that hold the same."""

    first: int
    last: int
    memory: MemoryEstimate

    @property
    def name(self) -> str:
        """The ranks' numbers."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def rank_groups(memory: Sequence[MemoryEstimate]) -> list[RankGroup]:
    """Return the ranks of a pipeline, those in a row that hold the same together."""
    groups: list[RankGroup] = []
    for rank, held in enumerate(memory):
        if groups and groups[-1].memory == held:
            groups[-1] = groups[-1]._replace(last=rank)
        else:
            groups.append(RankGroup(rank, rank, held))
    return groups


def memory_bars(chosen: PlannedStep, limit: int) -> str:
    """Return the ranks' memory as stacked bars; the whole width is the GPU's memory, and a line is the limit."""
    groups = rank_groups(chosen.estimate.memory)
    whole = max(chosen.estimate.job.cluster.memory_bytes, chosen.estimate.memory_bytes)
    fullest = max(groups, key=lambda group: (group.memory.total, -group.first))
    size = "tall" if len(groups) <= _TALL_ROWS else "usual" if len(groups) <= _ROWS else "thin"
    rows = [
        _memory_row(group, whole, labelled=group is fullest, named=_is_named(number, len(groups)) or group is fullest)
        for number, group in enumerate(groups)
    ]
    key = "".join(
        f'<li><i class="{name}"></i>{name} {part / GIB:.1f}</li>'
        for name, part in zip(fullest.memory._fields, fullest.memory, strict=True)
    )
    at = limit / whole * 100
    side = "after" if at < 50 else "before"
    named = f"rank {fullest.name}" if fullest.first == fullest.last else f"ranks {fullest.name}"
    return (
        f'<div class="ranks {size}" style="--limit:{at:.2f}%" role="img" aria-label="Memory by rank; the table below '
        f'has the figures">'
        f'<div class="rank top"><span>rank</span><span class="space"><b class="{side}">limit {limit / GIB:.1f} GiB</b>'
        f"</span><span>GiB</span></div>{''.join(rows)}</div>"
        f'<p class="key-title">Most is held by {named}, in GiB:</p><ul class="key">{key}</ul>'
    )


def _is_named(number: int, count: int) -> bool:
    return count <= _ROWS or number % _NAMED_EVERY == 0 or number == count - 1


def _memory_row(group: RankGroup, whole: int, *, labelled: bool, named: bool) -> str:
    parts = zip(group.memory._fields, group.memory, strict=True)
    bar = "".join(
        f'<i class="{name}" style="width:{size / whole * 100:.2f}%" title="{name}: {size / GIB:.2f} GiB">'
        + (f"<b><u>{name} </u>{size / GIB:.1f}</b>" if labelled else "")
        + "</i>"
        for name, size in parts
        if size
    )
    name, total = (group.name, f"{group.memory.total / GIB:.1f}") if named else ("", "")
    kind = "rank fullest" if labelled else "rank"
    return f'<div class="{kind}"><span>{name}</span><span class="space stack">{bar}</span><span>{total}</span></div>'


def memory_table(chosen: PlannedStep) -> str:
    """Return the ranks' memory by part as a table, in GiB."""
    names = chosen.estimate.memory[0]._fields
    rows = "".join(
        f'<tr><th scope="row">{group.name}</th>'
        + "".join(f"<td>{part / GIB:.1f}</td>" for part in (*group.memory, group.memory.total))
        + "</tr>"
        for group in rank_groups(chosen.estimate.memory)
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("rank", *names, "total"))
    table = f'<table class="rows numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def alternative_bars(others: Sequence[Alternative], typical: float, best_bytes: int) -> str:
    """Return what each change costs as rows of a table with a bar each; `typical` is the error that is shaded."""
    shares = [other.slower for other in others if other.slower is not None]
    low = min([0.0, *shares])
    scale = _Scale(min(low, -typical) if low < 0 else 0.0, min(_LONGEST, max([2 * typical, *shares])))
    band = scale.span(-typical, typical)
    rows = "".join(_alternative_row(other, scale, band, typical, best_bytes) for other in others)
    heads = ("change", "step against the choice", "", "memory", "where it goes")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f'<table class="rows bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


class _Scale(NamedTuple):
    """The shares at the left and the right end of the bars."""

    low: float
    high: float

    def span(self, start: float, stop: float) -> str:
        """Return the CSS of a span of shares."""
        left, right = (
            (min(max(share, self.low), self.high) - self.low) / (self.high - self.low) * 100 for share in (start, stop)
        )
        return f"left:{left:.2f}%;width:{right - left:.2f}%"


def _alternative_row(other: Alternative, scale: _Scale, band: str, typical: float, best_bytes: int) -> str:
    name = f"{escape(other.knob.replace('_', ' '))} <b>{escape(other.value)}</b>"
    if other.slower is None:
        held = other.estimate.memory_bytes / GIB
        return f'<tr><th scope="row">{name}</th><td></td><td></td><td>{held:.1f} GiB</td><td>does not fit</td></tr>'
    look = " cut" if other.slower > scale.high else " less" if other.slower < 0 else ""
    span = scale.span(*sorted((0.0, other.slower)))
    bar = f'<i class="band" style="{band}"></i><i class="bar{look}" style="{span}"></i>'
    bar += f'<i class="zero" style="{scale.span(0.0, 0.0)}"></i>'
    memory = (other.estimate.memory_bytes - best_bytes) / GIB
    parts = [part for part in other.reason.split(", ") if not part.startswith("memory ")]
    words = "; ".join([*(["within the error"] if abs(other.slower) <= typical else []), *parts])
    return (
        f'<tr><th scope="row">{name}</th><td class="chart"><div class="track">{bar}</div></td>'
        f"<td>{other.slower:+.1%}</td><td>{memory:+.1f} GiB</td><td>{escape(words)}</td></tr>"
    )
