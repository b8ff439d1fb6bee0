"""A recording of parts of layers -> Imported: one rank's lanes as they ran, at the grain of layers.

Such a profile (`attn(F)`, `dispatch(B)`, `mlp(W)`) shows a few layers of one rank, often a forward and a backward that
run overlapped. What pipeline they belong to is not in it: the schedule is the cells of this rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.ir import Action, Cell, Pair, Placement, Schedule
from treadle.ir.action import Kind
from treadle.ir.index import Index
from treadle.ir.needs import waits_of
from treadle.ir.ops import ACTIONS, BACKWARD, FORWARD, LAYER_PARTS, OpKind, OpPhase, of_parts
from treadle.ir.program import NEVER, Layout, Longs, Program
from treadle.ir.steps import Steps
from treadle.passes.append import LaneColumns, add_waits, append_lanes
from treadle.profiles.imported import Imported
from treadle.profiles.recording import RankRecording, Recording, Remark

_WEIGHTS = of_parts(OpPhase.W, reversed(LAYER_PARTS))
PARTS = (*FORWARD, *BACKWARD, *_WEIGHTS)
"""The parts of a layer."""


def has_parts(recording: Recording) -> bool:
    """Say whether parts of layers were recorded, and no whole cells."""
    kinds = np.unique(np.concatenate([rank.kind for rank in recording.ranks]))
    return bool(np.isin(kinds, PARTS).any()) and not np.isin(kinds, ACTIONS).any()


def assemble_parts(recording: Recording) -> Imported:
    """Make a Program of one rank's lanes in the order in which they ran.

    Raises:
        ValueError: there are several ranks, or a part has no micro-batch or layer.

    """
    if len(recording.ranks) != 1:
        files = " and ".join(rank.source for rank in recording.ranks[:2])
        raise ValueError(f"{files}: parts of layers are read of one rank, got {len(recording.ranks)}; give one file")
    (rank,) = recording.ranks
    used = np.flatnonzero(np.isin(rank.kind, PARTS))
    remarks = list(recording.remarks)
    if len(used) < len(rank):
        remarks.append(Remark("a mark is no part of a layer, and not used", rank.source, len(rank) - len(used)))
    steps = np.unique(rank.step[used]).tolist()
    rows = {step: used[rank.step[used] == step] for step in steps}
    labels = {step: _labels(rank, row) for step, row in rows.items()}
    if any(min(mb, layer) < 0 for label in labels.values() for _, mb, layer in label):
        raise ValueError(f"{rank.source}: a part of a layer names neither its micro-batch nor its layer")
    first = labels[steps[0]]
    whole = [step for step in steps if sorted(labels[step]) == sorted(first)]
    for step in sorted(set(steps) - set(whole)):
        remarks.append(Remark(f"step {step} is left out: it has other parts than step {steps[0]}", rank.source))
    program, placed = _program(rank, rows[steps[0]], first)
    start, end = (np.empty((len(whole), program.num_ops), np.int64) for _ in range(2))
    for at, step in enumerate(whole):
        op = {label: number for number, label in enumerate(placed)}
        order = [op[label] for label in labels[step]]
        start[at, order], end[at, order] = rank.start[rows[step]], rank.end[rows[step]]
    about = f"measured, {recording.form} profile of one rank"
    schedule = Schedule("imported", program.layout.placement, program.layout.num_mb, (_cells(rank, rows[steps[0]]),))
    return Imported(
        recording.form, schedule, False, Steps(program, tuple(whole), start, end, about=about), tuple(remarks)
    )


_Label = tuple[int, int, int]


def _labels(rank: RankRecording, row: Longs) -> list[_Label]:
    """Kind, micro-batch and layer of each mark."""
    columns = (rank.kind[row], rank.mb[row], rank.layer[row])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _cells(rank: RankRecording, row: Longs) -> tuple[Cell, ...]:
    """The forwards and backwards in the order in which they began; those that overlap are a pair."""
    cells: list[Cell] = []
    seen: set[Action] = set()
    for mark in row:
        back = int(rank.kind[mark]) not in FORWARD
        action = Action(Kind.B if back else Kind.F, int(rank.mb[mark]), 0)
        if action in seen:
            continue
        seen.add(action)
        before = cells[-1] if cells else None
        if isinstance(before, Action) and before.kind != action.kind and rank.joined[row].any():
            cells[-1] = Pair(*sorted((before, action)))
        else:
            cells.append(action)
    return tuple(cells)


def _program(rank: RankRecording, row: Longs, labels: Sequence[_Label]) -> tuple[Program, list[_Label]]:
    """The ops on their lanes, with what they need; and the label of each op."""
    lanes = sorted({OpKind(kind).lane for kind, _, _ in labels}, key=int)
    lane_of = np.array([lanes.index(OpKind(kind).lane) for kind, _, _ in labels])
    order = np.lexsort((rank.start[row], lane_of))
    placed = [labels[at] for at in order]
    kind, mb, layer = (np.array(column) for column in zip(*placed, strict=True))
    num, kinds = len(placed), {OpKind(each) for each in kind.tolist()}
    layout = Layout(
        placement=Placement.loop(1),
        num_mb=int(mb.max()) + 1,
        blocks=("t" * (int(layer.max()) + 1),),
        forward=tuple(part for part in FORWARD if part in kinds) or (OpKind.ATTN_F,),
        backward=tuple(part for part in BACKWARD if part in kinds) or (OpKind.ATTN_B,),
        weights=tuple(part for part in _WEIGHTS if part in kinds),
    )
    columns = LaneColumns(
        kind=kind.astype(np.uint8),
        mb=mb.astype(np.int32),
        chunk=np.zeros(num, np.int16),
        layer=layer.astype(np.int16),
        cell=np.zeros(num, np.int32),
        num_ops=np.bincount(lane_of, minlength=len(lanes)),
        rank=np.zeros(len(lanes), np.int32),
        lane=np.array(lanes, np.uint8),
        peer=np.full(len(lanes), NEVER, np.int32),
        group=np.full(len(lanes), NEVER, np.int32),
    )
    program = append_lanes(Program.empty(layout), [columns])
    return _with_needs(program), placed


def _with_needs(program: Program) -> Program:
    """Make each op wait for what it needs, as far as that was recorded."""
    ptr, waits = waits_of(program, Index.of(program))
    op = np.repeat(np.arange(program.num_ops, dtype=np.int32), np.diff(ptr))
    there = waits != NEVER
    return add_waits(program, op[there], waits[there])
