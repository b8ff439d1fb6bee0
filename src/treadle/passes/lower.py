"""The lanes of a Program at the grain of layers: templates laid out in columns, messages, copies.

Each function here makes one kind of lane for every rank; `lower_layers` puts them one behind the other and writes
down what each op needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.action import Kind
from treadle.ir.index import Index
from treadle.ir.kernel import kernel
from treadle.ir.needs import needs_of
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Layout, Longs, Program
from treadle.ir.schedule import Schedule
from treadle.passes.cells import lower_cells
from treadle.passes.layers import CellKind, Cells, Half, Shape
from treadle.passes.reduce import with_reduce
from treadle.passes.step_end import with_step_end
from treadle.passes.tied import with_tied


class LaneColumns(NamedTuple):
    """Some lanes with their ops: columns over ops, then columns over lanes. `gate` is an op waited for besides."""

    kind: Ints
    mb: Ints
    chunk: Ints
    layer: Ints
    cell: Ints
    gate: Ints
    size: Ints
    rank: Ints
    lane: LaneKind
    peer: Ints
    group: Ints


NEAR_CELLS = 2
"""Activations that are read again within this many cells are not offloaded."""


def lower_layers(schedule: Schedule, shape: Shape, *, reduce: bool = False) -> Program:
    """The Program of a schedule at the grain of layers; one pipeline, before it is spread over a mesh.

    `reduce`: gradients are summed with other pipelines' once a chunk has its last one; where every stage lives on two
    ranks they always are.
    """
    layout = shape.layout(schedule)
    cells = Cells.of(schedule, shape, layout)
    lanes = [_cell_lanes(schedule, cells, lane) for lane in (LaneKind.COMPUTE, LaneKind.EP, LaneKind.HOST)]
    if shape.offload:
        lanes += _copy_lanes(schedule, cells, layout)
    lanes += _channel_lanes(schedule)
    program = with_needs(_assemble([part for part in lanes if len(part.kind)], layout, shape))
    if not any(action.kind is not Kind.F for row in schedule.rows for cell in row for action in cell.actions):
        return program
    if reduce or layout.placement.num_pipes > 1:
        program = with_reduce(program, shape.moved.get(OpKind.REDUCE_GRAD, 0))
    program = with_tied(program, shape.tied, shape.moved.get(OpKind.REDUCE_TIED, 0))
    return with_step_end(program, shape.step_end)


def _cell_lanes(schedule: Schedule, cells: Cells, lane: LaneKind) -> LaneColumns:
    """A lane that cells lay their parts on: template after template."""
    parts = [template.on(lane) for template in cells.templates]
    size = np.array([len(p) for p in parts], np.int64)[cells.template]
    offset = np.cumsum(size) - size
    total = int(size.sum())
    columns = {name: np.empty(total, np.int32) for name in ("kind", "mb", "chunk", "layer", "cell")}
    local = np.arange(len(cells.rank), dtype=np.int32) - cells.first[cells.rank]
    for number, part in enumerate(parts):
        mine = np.flatnonzero(cells.template == number)
        where = offset[mine][:, None] + np.arange(len(part))
        half = [p.half for p in part]
        columns["kind"][where] = [p.kind for p in part]
        columns["layer"][where] = [p.layer for p in part]
        columns["mb"][where] = cells.mb[half][:, mine].T
        columns["chunk"][where] = cells.chunk[half][:, mine].T
        columns["cell"][where] = local[mine][:, None]
    per_rank = np.add.reduceat(size, cells.first[:-1]) if len(size) else np.zeros(schedule.pp, np.int64)
    return _on_own_lanes(columns, np.full(total, NEVER, np.int32), per_rank.astype(np.int32), lane)


def _on_own_lanes(columns: dict[str, Ints], gate: Ints, per_rank: Ints, lane: LaneKind) -> LaneColumns:
    """Lanes that each rank has for itself."""
    ranks = np.arange(len(per_rank), dtype=np.int32)
    alone = np.full(len(per_rank), NEVER, np.int32)
    return LaneColumns(**columns, gate=gate, size=per_rank, rank=ranks, lane=lane, peer=alone, group=alone)


def _copy_lanes(schedule: Schedule, cells: Cells, layout: Layout) -> list[LaneColumns]:
    """Out after each forward, in before each backward, layer by layer.

    An onload starts one cell before its backward, slot by slot: what comes in takes the room of what that cell's
    backward gives up. Copies belong to the cell that they run beside: the one after the forward, the one before the
    backward.
    """
    stage = np.array(layout.placement.stages, np.int32)
    local = np.arange(len(cells.rank), dtype=np.int32) - cells.first[cells.rank]
    made = np.isin(cells.kind, (CellKind.F, CellKind.PAIR))
    used = np.isin(cells.kind, (CellKind.B, CellKind.I, CellKind.PAIR))
    when = np.full((2, schedule.pp, schedule.vpp, layout.num_mb), NEVER, np.int32)
    for side, (half, chosen) in enumerate(((Half.FORWARD, made), (Half.BACKWARD, used))):
        when[side, cells.rank[chosen], cells.chunk[half][chosen], cells.mb[half][chosen]] = local[chosen]
    leaves = when[1] - when[0] > NEAR_CELLS
    lanes = []
    for half, chosen, kind in ((Half.FORWARD, made, OpKind.OFFLOAD), (Half.BACKWARD, used, OpKind.ONLOAD)):
        mine = np.flatnonzero(chosen & leaves[cells.rank, cells.chunk[half], cells.mb[half]])
        deep = np.array(layout.layers, np.int32)[stage[cells.rank[mine], cells.chunk[half][mine]]]
        slot = np.arange(int(deep.sum())) - np.repeat(np.cumsum(deep) - deep, deep)
        cell = np.repeat(mine, deep)
        columns = {
            "kind": np.full(len(cell), kind, np.int32),
            "mb": cells.mb[half][cell],
            "chunk": cells.chunk[half][cell],
            "layer": (slot if kind is OpKind.OFFLOAD else np.repeat(deep, deep) - 1 - slot).astype(np.int32),
            "cell": local[cell] + (1 if kind is OpKind.OFFLOAD else -1),
        }
        gate = np.full(len(cell), NEVER, np.int32) if kind is OpKind.OFFLOAD else _slot_gate(cells, cell - 1, slot)
        per_rank = np.bincount(cells.rank[cell], minlength=schedule.pp).astype(np.int32)
        lane = LaneKind.OUT if kind is OpKind.OFFLOAD else LaneKind.IN
        lanes.append(_on_own_lanes(columns, gate, per_rank, lane))
    return lanes


def _slot_gate(cells: Cells, cell: npt.NDArray[np.intp], slot: npt.NDArray[np.intp]) -> Ints:
    """The compute op just before a slot of a cell; compute lanes are the first, so it is an op's index too."""
    size = np.array([len(t.on(LaneKind.COMPUTE)) for t in cells.templates], np.int64)[cells.template]
    offset = np.cumsum(size) - size
    most = max(len(t.slots) for t in cells.templates)
    starts = np.array([[*t.slots, *[t.slots[-1]] * (most - len(t.slots))] for t in cells.templates])
    gate: Ints = (offset[cell] + starts[cells.template[cell], np.minimum(slot, most - 1)] - 1).astype(np.int32)
    return gate


def _channel_lanes(schedule: Schedule) -> list[LaneColumns]:
    """Sends in the order they are made, receives posted in the sender's order: as at the grain of cells."""
    coarse = lower_cells(schedule)
    lanes = []
    for lane in (LaneKind.SEND, LaneKind.RECV):
        mine = np.flatnonzero(coarse.lane_kind == lane)
        start, stop = coarse.lane_ptr[[mine[0], mine[-1] + 1]] if len(mine) else (0, 0)
        ops = slice(int(start), int(stop))
        fill = np.full(int(stop - start), NEVER, np.int32)
        lanes.append(
            LaneColumns(
                coarse.kind[ops].astype(np.int32),
                coarse.mb[ops],
                coarse.chunk[ops].astype(np.int32),
                np.zeros(len(fill), np.int32),
                coarse.cell[ops],
                fill,
                np.diff(coarse.lane_ptr)[mine].astype(np.int32),
                coarse.lane_rank[mine],
                lane,
                coarse.lane_peer[mine],
                coarse.lane_group[mine],
            )
        )
    return lanes


def _assemble(lanes: list[LaneColumns], layout: Layout, shape: Shape) -> Program:
    """One behind the other. The first group numbers are the channels', then those of other lanes."""

    def column(name: str) -> npt.NDArray[np.int32]:
        return np.concatenate([getattr(part, name) for part in lanes])

    kind = column("kind")
    moved = np.zeros(len(OpKind), np.int64)
    for op_kind, size in shape.moved.items():
        moved[op_kind] = size
    sizes = column("size")
    gate = column("gate")
    has_gate = gate >= 0
    return Program(
        layout=layout,
        kind=kind.astype(np.uint8),
        mb=column("mb"),
        chunk=column("chunk").astype(np.int16),
        layer=column("layer").astype(np.int16),
        cell=column("cell"),
        launch=np.full(len(kind), NEVER, np.int32),
        size_bytes=moved[kind],
        joined=np.zeros(len(kind), bool),
        lane_ptr=np.r_[0, np.cumsum(sizes)].astype(np.int64),
        lane_rank=column("rank"),
        lane_kind=np.repeat(np.array([part.lane for part in lanes], np.uint8), [len(part.rank) for part in lanes]),
        lane_peer=column("peer"),
        lane_group=_number_groups(lanes),
        dep_ptr=np.r_[0, np.cumsum(has_gate)].astype(np.int64),
        dep=gate[has_gate],
    )


def _number_groups(lanes: list[LaneColumns]) -> Ints:
    """Channels keep their numbers, which the two ends share; other groups get numbers of their own."""
    base = 1 + max((int(part.group.max(initial=-1)) for part in lanes if part.lane is LaneKind.SEND), default=-1)
    parts = []
    for part in lanes:
        own = part.lane not in (LaneKind.SEND, LaneKind.RECV)
        parts.append(np.where((part.group >= 0) & own, part.group + base, part.group))
    return np.concatenate(parts).astype(np.int32)


def with_needs(program: Program) -> Program:
    """Writes down what each op needs by the rule, besides what it waits for already; its own lane's order it has."""
    ptr, need = needs_of(program, Index.of(program))
    dep_ptr, dep = _merge(ptr, need, program.dep_ptr, program.dep, program.lane_of)
    return replace(program, dep_ptr=dep_ptr, dep=dep)


@kernel
def _merge(ptr: Longs, need: Ints, dep_ptr: Longs, dep: Ints, lane: Ints) -> tuple[Longs, Ints]:
    merged_ptr = np.zeros(len(ptr), np.int64)
    merged = np.empty(len(need) + len(dep), np.int32)
    count = 0
    for op in range(len(lane)):
        for k in range(ptr[op], ptr[op + 1]):
            wanted = need[k]
            if wanted < 0 or lane[wanted] != lane[op] or wanted > op:
                merged[count] = wanted
                count += 1
        for k in range(dep_ptr[op], dep_ptr[op + 1]):
            merged[count] = dep[k]
            count += 1
        merged_ptr[op + 1] = count
    return merged_ptr, merged[:count].copy()
