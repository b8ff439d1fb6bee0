"""What ranks recorded -> Steps: each mark put to the op of the Program that it is of.

A computation that names its micro-batch is that op; messages and reductions are the k-th of their kind on their rank.
A step that lacks a mark, or has one too many, is left out and reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.ir.program import Ints, Longs, OpKind, Program
from treadle.ir.steps import Steps
from treadle.passes.measured import TAIL
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording, Remark


def tail_of(recording: Recording) -> tuple[OpKind, ...]:
    """The ops around the cells that some rank recorded, in order."""
    seen = {int(kind) for rank in recording.ranks for kind in np.unique(rank.kind)}
    return tuple(kind for kind in TAIL if int(kind) in seen)


def measured_steps(program: Program, recording: Recording, about: str = "") -> tuple[Steps, list[Remark]]:
    """Put the marks of all ranks to the ops of a Program.

    Raises:
        ValueError: ranks are missing, or no step is whole.

    """
    layout = program.layout
    ranks = {(rank.pp, rank.dp): rank for rank in recording.ranks}
    wanted = [(pp, d) for pp in range(layout.placement.pp) for d in range(layout.dp)]
    if missing := [place for place in wanted if place not in ranks]:
        pp, d = missing[0]
        raise ValueError(
            f"{len(missing)} of {len(wanted)} ranks have no recording, the first is pipeline rank {pp} of replica {d}"
        )
    numbers = np.unique(np.concatenate([rank.step for rank in recording.ranks]))
    start = np.full((len(numbers), program.num_ops), -1, np.int64)
    end = start.copy()
    whole = np.ones(len(numbers), bool)
    remarks: list[Remark] = []
    rank_of = program.lane_rank[program.lane_of]
    for pp, d in wanted:
        own = np.flatnonzero(rank_of == pp * layout.dp + d).astype(np.int32)
        for op_kind in np.unique(program.kind[own]):
            ops = _in_order(program, own[program.kind[own] == op_kind])
            for at in _fill(program, ops, ranks[pp, d], numbers, start, end):
                whole[at] = False
                what = f"step {numbers[at]} does not have {len(ops)} x {OpKind(op_kind).name} and is left out"
                remarks.append(Remark(what, ranks[pp, d].source))
    if not whole.any():
        raise ValueError(f"no step is whole: {remarks[0]}")
    kept = tuple(int(number) for number in numbers[whole])
    return Steps(program, kept, start[whole], end[whole], about=about), remarks


def _in_order(program: Program, ops: Ints) -> Ints:
    """Ops of one kind in the order in which their rank does them: by cell, those of the step's end by their number."""
    return ops[np.argsort(program.cell[ops], kind="stable")]


def _fill(program: Program, ops: Ints, rank: RankRecording, numbers: Longs, start: Longs, end: Longs) -> Sequence[int]:
    """Put a rank's marks of one kind to its ops, and return the steps that have other marks than these ops."""
    marks = np.flatnonzero(rank.kind == program.kind[ops[0]])
    row = np.searchsorted(numbers, rank.step[marks])
    counts = np.bincount(row, minlength=len(numbers))
    bad = counts != len(ops)
    good = marks[~bad[row]]
    row = row[~bad[row]]
    by_step = np.argsort(row, kind="stable")  # marks are in order of start
    good, row = good[by_step], row[by_step]
    target = np.tile(ops, int((~bad).sum()))
    if (rank.mb[good] != UNKNOWN).all() and (rank.chunk[good] != UNKNOWN).all():
        place = {(int(program.mb[op]), int(program.chunk[op])): op for op in ops}
        labels = zip(rank.mb[good].tolist(), rank.chunk[good].tolist(), strict=True)
        target = np.array([place.get(label, UNKNOWN) for label in labels], np.int32)
        strange = np.bincount(row, target == UNKNOWN, minlength=len(numbers)) > 0
        double = np.array([len(set(target[row == at])) < counts[at] for at in range(len(numbers))])
        bad |= strange | double
        good, target, row = good[~bad[row]], target[~bad[row]], row[~bad[row]]
    start[row, target], end[row, target] = rank.start[good], rank.end[good]
    return np.flatnonzero(bad).tolist()
