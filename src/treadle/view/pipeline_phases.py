"""Where a rank's warm-up ends and its cool-down begins, and which of its cells a reader should look at.

Warm-up is what comes before the first cell with a backward, cool-down what comes after the last one with a forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from treadle.ir.ops import LaneKind, OpKind, OpPhase, where
from treadle.ir.program import Ints, Longs
from treadle.ir.trace import Trace

Phase: TypeAlias = Literal["warmup", "steady", "cooldown"]

_FORWARD = where(lane=LaneKind.COMPUTE, phase=OpPhase.F)
_BACKWARD = (*where(lane=LaneKind.COMPUTE, phase=OpPhase.B), OpKind.I)
_COPIES: dict[int, tuple[Phase, ...]] = {LaneKind.OUT: ("warmup", "steady"), LaneKind.IN: ("steady", "cooldown")}
"""Forwards alone only send copies out, backwards alone only bring them back."""


@dataclass(frozen=True)
class Phases:
    """A rank's phases in ticks; `lone` and `paired` are its cells with forwards alone and with both."""

    start: int
    warm: int
    cool: int
    end: int
    lone_forward: Ints
    paired: Ints
    lone_backward: Ints

    @property
    def extra(self) -> int:
        """The last lone forward before a steady phase made of overlapped cells alone, or -1.

        It is what lets a forward and a backward of different micro-batches meet on every rank.
        """
        if not len(self.paired) or not len(self.lone_forward):
            return -1
        before, after = int(self.paired[0]), int(self.paired[-1])
        simple = (self.lone_forward < before).all() and (self.lone_backward > after).all()
        return int(self.lone_forward.max()) if simple and after - before + 1 == len(self.paired) else -1

    def cells(self, which: Phase) -> Ints:
        """The cells of a kind that lie in their phase."""
        if which == "steady":
            return self.paired
        first = int(min(self.paired.min(initial=1 << 30), self.lone_backward.min(initial=1 << 30)))
        if which == "warmup":
            return self.lone_forward[self.lone_forward < first]
        last = int(max(self.paired.max(initial=-1), self.lone_forward.max(initial=-1)))
        return self.lone_backward[self.lone_backward > last]


def compute_ops(trace: Trace, rank: int) -> Longs:
    """The ops of a rank's compute lane, in order."""
    program = trace.program
    lanes = np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))
    spans = [np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1]) for lane in lanes]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def phases(trace: Trace, rank: int) -> Phases:
    """The phases of a rank."""
    ops = compute_ops(trace, rank)
    cell, kind = trace.program.cell[ops], trace.program.kind[ops]
    start, end = trace.start[ops], trace.end[ops]
    forward, backward = np.isin(kind, _FORWARD), np.isin(kind, _BACKWARD)
    with_f, with_b = np.unique(cell[forward]), np.unique(cell[backward])
    begin, stop = (int(start.min()), int(end.max())) if len(ops) else (0, 0)
    warm = int(start[cell == with_b[0]].min()) if len(with_b) else stop
    cool = max(warm, int(end[cell == with_f[-1]].max())) if len(with_f) else begin
    return Phases(
        begin,
        warm,
        cool,
        stop,
        np.setdiff1d(with_f, with_b),
        np.intersect1d(with_f, with_b),
        np.setdiff1d(with_b, with_f),
    )


def extra_cells(trace: Trace) -> dict[int, int]:
    """The extra warm-up cell of each rank, where every rank has one."""
    found = {rank: phases(trace, rank).extra for rank in range(trace.program.num_ranks)}
    return found if all(cell >= 0 for cell in found.values()) else {}


def pick_cell(trace: Trace, which: Phase, rank: int) -> int:
    """A cell in the middle of its phase, of those beside which the copies run that belong to the phase."""
    cells = phases(trace, rank).cells(which)
    if not len(cells):
        wanted = {"warmup": "lone forwards", "steady": "overlapped cells", "cooldown": "lone backwards"}[which]
        raise ValueError(
            f"rank {rank} has no {wanted} to draw; 'interleaved-overlap' has all of warmup, steady and cooldown"
        )
    program = trace.program
    mine = np.flatnonzero(program.lane_rank == rank)
    typical = np.zeros(len(cells), np.int64)
    for lane in mine[np.isin(program.lane_kind[mine], list(_COPIES))]:
        beside = np.isin(cells, program.cell[program.lane_ptr[lane] : program.lane_ptr[lane + 1]])
        typical += beside == (which in _COPIES[int(program.lane_kind[lane])])
    best = cells[typical == typical.max()]
    return int(best[len(best) // 2])
