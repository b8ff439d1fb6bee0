"""The figure of a circle on shared communicators: what each of its ranks issues, in order, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Ints, Program
from treadle.verifier.communicator_queues import Judgement
from treadle.view.palette import Look
from treadle.view.sheet import FAINT, INK, Sheet

RED = "#c81e1e"
_CIRCLE, _CELL, _MESSAGE = Look("#ffd9d6"), Look("#e4e4e4"), Look("#ffffff")
_LEFT, _TOP, _WIDTH, _GAP, _HEIGHT, _PITCH = 44.0, 12.0, 66.0, 10.0, 18.0, 58.0
"""Points: where boxes begin, their width and what is between them, their height, and from one rank to the next."""
_MOST_BETWEEN = 4
"""Items of a row that are drawn between two of the circle; of more the rest is left out."""
_LEAST_WIDTH = 260.0


@dataclass(frozen=True)
class _RankItems:
    """A rank: its items that are drawn, NEVER for those left out."""

    rank: int
    ops: tuple[int, ...]


def circle_sheet(program: Program, issued: Sequence[Ints], judgement: Judgement, title: str) -> Sheet:
    """Draw the ranks of the circle, each with what it issues around it, and an arrow for each wait."""
    steps = [step for step in judgement.circle if step.wanted != NEVER]
    ops = {op for step in steps for op in (step.waiting, step.wanted)}
    rows = [_row(rank, own.tolist(), ops) for rank, own in enumerate(issued) if ops & set(own.tolist())]
    longest = max((len(row.ops) for row in rows), default=1)
    sheet = Sheet(max(_LEAST_WIDTH, _LEFT + longest * (_WIDTH + _GAP)))
    sheet.text(4, _TOP, title, bold=True)
    place: dict[int, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        top = _TOP + 26 + number * _PITCH
        sheet.text(4, top + _HEIGHT / 2, f"rank {row.rank}", colour=INK)
        for column, op in enumerate(row.ops):
            left = _LEFT + column * (_WIDTH + _GAP)
            if op == NEVER:
                sheet.text(left + _WIDTH / 2, top + _HEIGHT / 2, "...", across="center", colour=FAINT)
                continue
            place.setdefault(op, (left, top))
            _box(sheet, program, op, left, top, circled=op in ops)
    for step in steps:
        if step.waiting != step.wanted:
            _arrow(sheet, place[step.waiting], place[step.wanted])
    sheet.y = _TOP + 26 + len(rows) * _PITCH - (_PITCH - _HEIGHT) + 22
    sheet.text(4, sheet.y, "In order of issue, left to right. Red: each waits for the next.", size=7, colour=FAINT)
    sheet.y += 8
    return sheet


def _row(rank: int, own: list[int], ops: set[int]) -> _RankItems:
    places = [place for place, op in enumerate(own) if op in ops]
    first, last = max(0, places[0] - 1), min(len(own), places[-1] + 2)
    kept = set(range(first, places[0])) | set(range(places[-1], last)) | set(places)
    for before, after in pairwise(places):
        if after - before - 1 <= _MOST_BETWEEN:
            kept |= set(range(before, after))
    shown: list[int] = [NEVER] if first else []
    previous = None
    for place in sorted(kept):
        if previous is not None and place > previous + 1:
            shown.append(NEVER)
        shown.append(own[place])
        previous = place
    return _RankItems(rank, (*shown, *([NEVER] if last < len(own) else [])))


def _box(sheet: Sheet, program: Program, op: int, left: float, top: float, *, circled: bool) -> None:
    corners = np.array([[left, top, left + _WIDTH, top + _HEIGHT]])
    shown = program.op(op)
    is_cell = shown.lane.kind is LaneKind.COMPUTE
    sheet.rectangles(corners, _CIRCLE if circled else _CELL if is_cell else _MESSAGE)
    if circled:
        sheet.outlines(corners, RED, 1.6)
    verb = "send " if shown.kind.is_send else "receive " if shown.kind.is_recv else ""
    colour = RED if circled else INK
    sheet.text(left + _WIDTH / 2, top + _HEIGHT / 2, f"{verb}{shown.label}", across="center", colour=colour)


def _arrow(sheet: Sheet, waits: tuple[float, float], wanted: tuple[float, float]) -> None:
    """From a box to the one it waits for: straight between rows, a bow over its own row."""
    (left, top), (to_left, to_top) = waits, wanted
    if top == to_top:
        bend = 18 / max(abs(left - to_left), 1) * (1 if left > to_left else -1)
        sheet.arrow((left + _WIDTH / 2 - 6, top), (to_left + _WIDTH / 2 + 6, to_top), RED, bend=bend)
        return
    down = to_top > top
    aside = 5.0 if down else -5.0  # two arrows between the same boxes stay apart
    start, stop = (top + _HEIGHT, to_top) if down else (top, to_top + _HEIGHT)
    sheet.arrow((left + _WIDTH / 2 + aside, start), (to_left + _WIDTH / 2 + aside, stop), RED, bend=0.0)
