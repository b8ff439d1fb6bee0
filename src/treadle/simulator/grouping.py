"""Ops that are alike, taken together: their kind as costs name it, and counts, medians and totals in linear time."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.kernel import kernel
from treadle.ir.ops import OpKind
from treadle.ir.program import Bytes, Ints, Longs, Program

Floats: TypeAlias = npt.NDArray[np.float64]

PAIR = len(OpKind)
"""An overlapped pair is a kind of work of its own: its time is neither its F's nor its B's."""

WORK = (*(kind.name.lower() for kind in OpKind), "fb")
"""The name of each kind of work in costs and tables."""


class Tally(NamedTuple):
    """Return count, median (0 where there are none) and total of the values of each code."""

    num: Longs
    median: Floats
    total: npt.NDArray[Any]


def work_of(program: Program) -> Bytes:
    """Return the kind of each op, and PAIR for both ops of an overlapped cell."""
    work = program.kind.copy()
    second = np.flatnonzero(program.joined)
    work[second] = PAIR
    work[second - 1] = PAIR
    return work


def tally(code: Ints, num_codes: int, values: Longs | Floats) -> Tally:
    """Counts, medians and totals of values by their codes, which are 0..num_codes-1."""
    return Tally(*_tally(code, num_codes, values))


@kernel
def _tally(code: Ints, num_codes: int, values: npt.NDArray[Any]) -> tuple[Longs, Floats, npt.NDArray[Any]]:
    ptr = np.zeros(num_codes + 1, np.int64)
    for c in code:
        ptr[c + 1] += 1
    for c in range(num_codes):
        ptr[c + 1] += ptr[c]
    fill = ptr[:-1].copy()
    ordered = np.empty_like(values)
    total = np.zeros(num_codes, values.dtype)
    for k in range(len(values)):
        ordered[fill[code[k]]] = values[k]
        fill[code[k]] += 1
        total[code[k]] += values[k]
    median = np.zeros(num_codes)
    for c in range(num_codes):
        if ptr[c + 1] > ptr[c]:
            median[c] = np.median(ordered[ptr[c] : ptr[c + 1]])
    return np.diff(ptr), median, total
