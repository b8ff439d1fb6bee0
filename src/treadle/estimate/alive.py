"""What a schedule keeps alive: on each rank and at each moment, how many micro-batches of each chunk have activations.

A rank's own row decides it, whatever its times: a forward makes a micro-batch's activations, its backward frees them.
Where the backward is split, dgrad leaves what wgrad needs, and wgrad frees that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from treadle.ir import Cell, Kind
from treadle.ir.schedule import Row
from treadle.schedules import family


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a step that may be a rank's peak, of all ranks one below the other.

    In moment i rank `rank[i]` computes a forward of chunk `forward[i]` and a backward of chunk `backward[i]` (-1: none)
    while `full[i, c]` micro-batches of chunk c have all they saved, and `split[i, c]` what their wgrad needs. A wgrad
    alone is a moment as well: what was recomputed for dgrad lives until then.
    """

    rank: npt.NDArray[np.int64]
    forward: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]
    full: npt.NDArray[np.float64]
    split: npt.NDArray[np.float64]
    starts: tuple[int, ...]
    """Where the moments of each rank begin, and where the last one's end."""

    splits: bool
    """Some backward is split."""


def moments(schedule: str, *, pp: int, vpp: int, microbatches: int) -> Moments:
    """Return the moments of a schedule that may be peaks; a moment in which less of everything lives is left out.

    From some number of micro-batches on, most schedules keep no more alive: then few stand for many.

    Raises:
        ValueError: there is no such schedule, or it cannot do this size.

    Example:
        >>> found = moments("1f1b", pp=2, vpp=1, microbatches=64)
        >>> [(int(rank), int(count)) for rank, (count,) in zip(found.rank, found.full)]
        [(0, 2), (0, 2), (1, 1), (1, 1)]

    """
    chosen = family(schedule)
    chosen.size(pp, vpp, microbatches)
    rest = microbatches % (2 * pp)
    for few in (2 * pp + rest, 4 * pp + rest):
        if few + 2 * pp < microbatches and _saturated(schedule, pp, vpp, few):
            return _moments(schedule, pp, vpp, few)
    return _moments(schedule, pp, vpp, microbatches)


@lru_cache(maxsize=1024)
def _saturated(schedule: str, pp: int, vpp: int, few: int) -> bool:
    """Return True if more micro-batches keep no more alive."""
    less, more = _moments(schedule, pp, vpp, few), _moments(schedule, pp, vpp, few + 2 * pp)
    pairs = ((less.rank, more.rank), (less.full, more.full), (less.split, more.split))
    return all(np.array_equal(one, other) for one, other in pairs)


@lru_cache(maxsize=1024)
def _moments(schedule: str, pp: int, vpp: int, microbatches: int) -> Moments:
    chosen = family(schedule)
    rows = chosen.generate(chosen.size(pp, vpp, microbatches)).rows
    found = [(rank, *moment) for rank, row in enumerate(rows) for moment in _of_row(row, vpp)]
    columns = list(zip(*found, strict=True))
    rank, forward, backward = (np.array(column, np.int64) for column in columns[:3])
    full, split = (np.array(column, np.float64) for column in columns[3:])
    starts = tuple(np.searchsorted(rank, np.arange(pp + 1)).tolist())
    return Moments(rank, forward, backward, full, split, starts, bool(split.any()))


_Counts = tuple[int, ...]


def _of_row(row: Row, vpp: int) -> list[tuple[int, int, _Counts, _Counts]]:
    """Walk over a rank's cells; return (forward, backward, full, split), those that others exceed left out."""
    full, split = [0] * vpp, [0] * vpp
    seen: dict[tuple[int, int], set[tuple[_Counts, _Counts]]] = {}
    for cell in row:
        chunks = _computed(cell)
        if chunks[0] >= 0:
            full[chunks[0]] += 1
        seen.setdefault(chunks, set()).add((tuple(full), tuple(split)))
        for action in cell.actions:
            if action.kind in (Kind.B, Kind.I):
                full[action.chunk] -= 1
            if action.kind is Kind.I:
                split[action.chunk] += 1
            if action.kind is Kind.W:
                split[action.chunk] -= 1
    return [(*chunks, *state) for chunks in sorted(seen) for state in _largest(seen[chunks])]


def _computed(cell: Cell) -> tuple[int, int]:
    """Return the chunk that runs forward and the one that runs backward; wgrad takes nothing."""
    forward = backward = -1
    for action in cell.actions:
        if action.kind is Kind.F:
            forward = action.chunk
        elif action.kind is not Kind.W:
            backward = action.chunk
    return forward, backward


def _largest(states: set[tuple[_Counts, _Counts]]) -> list[tuple[_Counts, _Counts]]:
    """Return the states that no other one exceeds everywhere."""
    ordered = sorted(states, key=lambda state: -sum(state[0]) - sum(state[1]))
    kept: list[tuple[_Counts, _Counts]] = []
    for state in ordered:
        flat = state[0] + state[1]
        if not any(all(a <= b for a, b in zip(flat, other[0] + other[1], strict=True)) for other in kept):
            kept.append(state)
    return sorted(kept)
