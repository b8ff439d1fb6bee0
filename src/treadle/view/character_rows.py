"""A trace as rows of characters that fit a terminal, coloured where it has colours and readable where it has not.

    0  F0-F1-F2-F3----------B0----F4-B1----...
    1     F0-F1-F2-------B0----F3-B1----F4-...

A box begins with its kind and micro-batch where they fit, with its kind alone where they do not; at the grain of layers
capitals are forward and small letters backward. Of a weight update the rows are buffers and the numbers rounds: H2D,
broadcast from here (S) and from elsewhere (D), reload. A step that is too long for one strip is folded into several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.style import Style
from rich.text import Text

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Trace
from treadle.view.boxes import Floats
from treadle.view.palette import ROLE_OF, Palette, Role, palette
from treadle.view.update_rows import buffer_rows

if TYPE_CHECKING:
    from treadle.view.hang import Hang

LETTERS: dict[OpKind, str] = {kind: kind.letter for kind in OpKind}

_LANE_ORDER = (LaneKind.COMPUTE, LaneKind.EP, LaneKind.SEND, LaneKind.OUT, LaneKind.IN)
_MOST_ROWS = 64
_MOST_LINES = 96
"""Lines of a folded step; one that needs more is drawn in one strip, after a note."""


def terminal_rows(
    trace: Trace,
    width: int,
    *,
    colour: bool,
    palette_name: str = "kimi",
    lanes: bool = False,
    hang: Hang | None = None,
) -> Iterator[Text]:
    """Yield the rows of a trace, a rank each or a lane each, and notes on what had to give.

    Of a step that hangs, what waits begins with "?", what waits in a circle with "!".
    """
    looks = palette(palette_name)
    named = _buffers(trace) if trace.program.layout.is_update else _lanes(trace.program, lanes)
    margin = max((len(name) for name, _ in named), default=0) + 2
    columns = max(20, width - margin)
    shown = [(name, _shown(trace, ops)) for name, ops in named[:_MOST_ROWS]]
    shortest = min((int((ops.end - ops.start).min()) for _, ops in shown if len(ops.op)), default=trace.makespan)
    strips = _strips(trace.makespan, shortest, columns, len(shown))
    if shortest * columns * strips < trace.makespan:
        yield Text("ops shorter than a column do not show; a wider terminal shows more, -o page.html all", style="dim")
    for strip in range(strips):
        if strips > 1:
            ends = (trace.clock.show(at * trace.makespan / strips) for at in (strip, strip + 1))
            yield Text(f"{'':<{margin}}from {next(ends):.4g} to {next(ends):.4g} {_unit(trace)}", style="dim")
        middles = trace.start.min() + (np.arange(columns) + 0.5 + strip * columns) * trace.makespan / columns / strips
        for name, ops in shown:
            yield Text(f"{name:<{margin}}").append_text(_row(trace, ops, middles, looks, colour, hang))
    yield from _notes(trace, columns * strips, len(named))
    if hang is not None:
        circle = "; ! waits in a circle" if hang.circle else ""
        yield Text(f"hangs at {hang.since(trace):g}: ? never starts{circle}", style="bold red" if colour else "")


def _buffers(trace: Trace) -> list[tuple[str, Longs]]:
    """Return the rows of an update: one for each buffer of each device."""
    ranks = range(min(trace.program.num_ranks, _MOST_ROWS))
    return [(f"{row.rank}/{row.name}", row.ops) for row in buffer_rows(trace, ranks)]


def _lanes(program: Program, lanes: bool) -> list[tuple[str, Longs]]:
    """The lanes to show, with their names and ops."""
    chosen = [lane for lane in _in_order(program) if lanes or program.lane_kind[lane] == LaneKind.COMPUTE]
    ptr = program.lane_ptr
    return [(_name(program, lane, lanes), np.arange(ptr[lane], ptr[lane + 1])) for lane in chosen]


def _in_order(program: Program) -> list[int]:
    """Rank by rank, compute first; sends to any peer are one kind of row."""
    wanted = [lane for lane in range(program.num_lanes) if LaneKind(int(program.lane_kind[lane])) in _LANE_ORDER]
    return sorted(
        wanted, key=lambda lane: (int(program.lane_rank[lane]), _LANE_ORDER.index(program.lane_kind[lane]), lane)
    )


def _name(program: Program, lane: int, lanes: bool) -> str:
    rank = int(program.lane_rank[lane])
    return f"{rank} {program.lane(lane).name.replace('rank ', '')}" if lanes else str(rank)


class _Shown(NamedTuple):
    """The ops of a row, and when each starts and ends as it is drawn."""

    op: Longs
    start: Longs
    end: Longs


def _strips(makespan: int, shortest: int, columns: int, rows: int) -> int:
    """Return the number of strips in which the shortest op has two columns, or one; 1 if that is too long to read."""
    if makespan <= shortest * columns:
        return 1
    wanted = (math.ceil(makespan * each / (shortest * columns)) for each in (2, 1))
    return next((count for count in wanted if count * (rows + 1) <= _MOST_LINES), 1)


def _row(trace: Trace, shown: _Shown, middles: Floats, looks: Palette, colour: bool, hang: Hang | None) -> Text:
    """Return the row whose columns show the op that runs at their middle; ops that start together share columns."""
    program, ops = trace.program, shown.op
    at = np.searchsorted(shown.start, middles, side="right") - 1
    found = (at >= 0) & (shown.end[np.maximum(at, 0)] > middles) if len(ops) else np.zeros(len(middles), bool)
    running = np.where(found, at, -1)
    row = Text()
    for first, last, which in _runs(running):
        if which < 0:
            row.append(" " * (last - first))
        elif hang is not None and hang.waiting[ops[which]]:
            row.append(*_waiting_box(program, int(ops[which]), last - first, hang, colour))
        else:
            row.append(*_box(program, int(ops[which]), last - first, looks, colour))
    return row


def _shown(trace: Trace, ops: Longs) -> _Shown:
    """Return the ops that take time, with the forward and the backward of a pair one after the other."""
    ops = ops[trace.end[ops] > trace.start[ops]]
    start, end = trace.start[ops].copy(), trace.end[ops].copy()
    for second in np.flatnonzero(trace.program.joined[ops]):
        middle = (start[second] * 2 + end[second]) // 3
        end[second - 1] = start[second] = middle
    return _Shown(ops, start, end)


def _unit(trace: Trace) -> str:
    return "units" if trace.clock.unit == "unit" else trace.clock.unit


def _runs(running: Longs) -> Iterator[tuple[int, int, int]]:
    edges = np.flatnonzero(np.diff(running)) + 1
    bounds = [0, *map(int, edges), len(running)]
    for first, last in pairwise(bounds):
        yield first, last, int(running[first])


def _box(program: Program, op: int, width: int, looks: Palette, colour: bool) -> tuple[str, Style]:
    kind = OpKind(int(program.kind[op]))
    letter, mb, role = LETTERS[kind], int(program.mb[op]), ROLE_OF[kind]
    if role is Role.BROADCAST and program.op(op).layer == program.op(op).lane.rank:
        letter, role = "S", Role.SOURCE
    label = f"{letter}{mb}" if mb >= 0 and len(f"{letter}{mb}") < width + (width > 1) else letter
    text = label[:width].ljust(width, " " if colour else "-")
    look = looks[role]
    return text, Style(color=look.text, bgcolor=look.fill) if colour else Style()


def _waiting_box(program: Program, op: int, width: int, hang: Hang, colour: bool) -> tuple[str, Style]:
    circle = bool(hang.in_circle[op])
    label = f"{'!' if circle else '?'}{LETTERS[OpKind(int(program.kind[op]))]}"
    label += str(int(program.mb[op])) if program.mb[op] >= 0 else ""
    style = Style(color="#c81e1e", bold=True) if circle else Style(dim=True)
    return label[:width].ljust(width, "."), style if colour else Style()


def _notes(trace: Trace, columns: int, num_rows: int) -> Iterator[Text]:
    column = trace.clock.show(trace.makespan / columns)
    yield Text(f"a column is {column:.3g} {_unit(trace)}; {trace.about}", style="dim")
    if num_rows > _MOST_ROWS:
        yield Text(f"... and {num_rows - _MOST_ROWS} more rows (-o page.html shows them all)", style="dim")
