"""Which schedule ran: the rows of a run beside those that Treadle generates at its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from treadle.ir import Action, Cell, Schedule
from treadle.schedules import known

_MORE_RANKS = 8
"""Longer pipelines are tried up to twice the ranks, and a few more."""


def candidates(pp: int, vpp: int, num_mb: int) -> Iterator[Schedule]:
    """Every schedule that Treadle generates at this size."""
    for family in known().values():
        try:
            size = family.size(pp, vpp, num_mb)
        except ValueError:
            continue
        yield family.generate(size)


def name(schedule: Schedule) -> tuple[Schedule, str]:
    """Return the schedule under the name of the one that it equals, or with what it differs in from the nearest one."""
    nearest, best = "", -1
    for other in candidates(schedule.pp, schedule.placement.vpp, schedule.num_microbatches):
        if other.placement != schedule.placement:
            continue
        place = _first_difference(schedule.rows, other.rows)
        if place is None:
            return replace(schedule, name=other.name), ""
        alike = _num_alike(schedule.rows, other.rows)
        if alike > best:
            rank, at = place
            best, nearest = alike, f"nearest is {other.name}: {_told(schedule, other, rank, at)}"
    return schedule, _longer_pipeline(schedule) or nearest or "no schedule here has its placement"


def _longer_pipeline(schedule: Schedule) -> str:
    """Say whether these are the first rows of a longer pipeline, whose last ranks are missing then."""
    for pp in range(schedule.pp + 1, 2 * schedule.pp + _MORE_RANKS):
        for other in candidates(pp, schedule.placement.vpp, schedule.num_microbatches):
            if other.rows[: schedule.pp] == schedule.rows:
                known = f"they are the first {schedule.pp} of {pp} ranks of {other.name}"
                return f"{known}: files of the last ranks are missing"
    return ""


def _first_difference(rows: Sequence[Sequence[Cell]], others: Sequence[Sequence[Cell]]) -> tuple[int, int] | None:
    for rank, (row, other) in enumerate(zip(rows, others, strict=True)):
        for at in range(max(len(row), len(other))):
            if row[at : at + 1] != other[at : at + 1]:
                return rank, at
    return None


def _num_alike(rows: Sequence[Sequence[Cell]], others: Sequence[Sequence[Cell]]) -> int:
    pairs = (zip(row, other, strict=False) for row, other in zip(rows, others, strict=True))
    return sum(cell == other for pair in pairs for cell, other in pair)


def _told(schedule: Schedule, other: Schedule, rank: int, at: int) -> str:
    def cell(rows: Sequence[Sequence[Cell]]) -> str:
        return str(rows[rank][at]) if at < len(rows[rank]) else "nothing"

    return f"cell {at} of rank {rank} was {cell(schedule.rows)}, there {cell(other.rows)}"


def actions_of(row: Sequence[Cell]) -> list[Action]:
    """Return the actions of a row, one after the other."""
    return [action for cell in row for action in cell.actions]
