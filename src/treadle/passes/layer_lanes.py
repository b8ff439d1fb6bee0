"""The lanes of a Program at the grain of layers: templates laid out in columns, copies, messages.

Each function here makes some kinds of lanes for every rank; `lower_layers` appends them to each other and writes down
what each op waits for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.action import Kind
from treadle.ir.columns import OpLabels
from treadle.ir.index import Index
from treadle.ir.kernel import kernel
from treadle.ir.needs import waits_of
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Bytes, Ints, Layout, Longs, Program, Shorts
from treadle.ir.schedule import Schedule
from treadle.passes.append import LaneColumns, append_lanes, ops_of
from treadle.passes.cells import lower_cells
from treadle.passes.layers import CellKind, Cells, Half, Shape
from treadle.passes.step_end import with_step_end

NEAR_CELLS = 2
"""Activations that are read again within this many cells are not offloaded."""

_CELL_LANES = (LaneKind.COMPUTE, LaneKind.EP, LaneKind.HOST)
"""The lanes that templates lay their parts on."""


def lower_layers(schedule: Schedule, shape: Shape, *, reduce: bool = False, gather: bool = False) -> Program:
    """Return the Program of a schedule at the grain of layers; one pipeline, before it is spread over a mesh.

    `reduce`: gradients are summed with those of other ranks that hold the stage once a chunk, or a bucket of the shape,
    has its last one. `gather`: parameters are gathered by bucket before they are read.
    """
    layout = shape.layout(schedule)
    cells = Cells.of(schedule, shape, layout)
    lanes = [_cell_lanes(cells)]
    gate = np.empty(0, np.int32)
    if shape.offload:
        offloads, onloads, gate = _copy_lanes(schedule, cells, layout)
        lanes += [copies for copies in (offloads, onloads) if len(copies.kind)]
    lanes.append(_channel_lanes(schedule))
    program = append_lanes(Program.empty(layout), lanes, shape.moved)
    index = Index.of(program)
    dep_ptr, dep = waits_of(program, index, ops_of(program, OpKind.ONLOAD)[gate >= 0], gate[gate >= 0])
    program = replace(program, dep_ptr=dep_ptr, dep=dep)
    if (schedule.columns.kind == Kind.F).all():
        return program
    return with_step_end(
        program,
        reduce=reduce,
        gather=gather,
        tied=shape.tied,
        step_end=shape.step_end,
        buckets=shape.buckets,
        moved=shape.moved,
        index=index,
    )


class _Parts(NamedTuple):
    """The parts of all templates, lane by lane: of template t on the k-th lane from `ptr[k, t]` to `stop[k, t]`."""

    ptr: Longs
    stop: Longs
    kind: Bytes
    layer: Shorts
    half: Bytes

    @classmethod
    def of(cls, cells: Cells, lanes: list[LaneKind]) -> _Parts:
        """Take the parts of the cells' templates on these lanes."""
        parts = [template.on(lane) for lane in lanes for template in cells.templates]
        stop = np.cumsum([len(part) for part in parts])
        ptr = stop - [len(part) for part in parts]
        kind, layer, half = np.array([op for part in parts for op in part], np.int16).reshape(-1, 3).T
        shape = len(lanes), len(cells.templates)
        return cls(ptr.reshape(shape), stop.reshape(shape), kind.astype(np.uint8), layer.copy(), half.astype(np.uint8))


def _cell_lanes(cells: Cells) -> LaneColumns:
    """Return the lanes that cells lay their parts on, template after template; a kind that has no parts has no lane."""
    lanes = [lane for lane in _CELL_LANES if any(template.on(lane) for template in cells.templates)]
    parts = _Parts.of(cells, lanes)
    ends = np.cumsum((parts.stop - parts.ptr)[:, cells.template], axis=1)
    per_rank = np.diff(np.pad(ends, ((0, 0), (1, 0)))[:, cells.first], axis=1)
    pp, total = len(cells.first) - 1, int(per_rank.sum())
    kind, layer = np.empty(total, np.uint8), np.empty(total, np.int16)
    columns = OpLabels(kind, np.empty(total, np.int32), np.empty(total, np.int16), layer)
    cell = np.empty(total, np.int32)
    _lay_out(parts, cells.template, cells.mb, cells.chunk, cells.local, columns, cell)
    alone = np.full(pp * len(lanes), NEVER, np.int32)
    return LaneColumns(
        **columns._asdict(),
        cell=cell,
        num_ops=per_rank.reshape(-1),
        rank=np.tile(np.arange(pp, dtype=np.int32), len(lanes)),
        lane=np.repeat(np.array(lanes, np.uint8), pp),
        peer=alone,
        group=alone,
    )


@kernel
def _lay_out(
    parts: _Parts, template: Ints, mbs: Ints, chunks: Ints, local: Ints, columns: OpLabels, cell: Ints
) -> None:
    """Write the columns of the ops, lane by lane, cell after cell."""
    kind, mb, chunk, layer = columns.kind, columns.mb, columns.chunk, columns.layer
    ptr, stop, part_kind, part_layer, part_half = parts.ptr, parts.stop, parts.kind, parts.layer, parts.half
    op = 0
    for lane in range(len(ptr)):
        for at in range(len(template)):
            for part in range(ptr[lane, template[at]], stop[lane, template[at]]):
                half = part_half[part]
                kind[op], layer[op] = part_kind[part], part_layer[part]
                mb[op], chunk[op], cell[op] = mbs[half, at], chunks[half, at], local[at]
                op += 1


def _copy_lanes(schedule: Schedule, cells: Cells, layout: Layout) -> tuple[LaneColumns, LaneColumns, Ints]:
    """Return lanes with an offload after each forward and an onload before each backward, layer by layer.

    The third is an op that each onload waits for: it starts one cell before its backward, slot by slot, so that what
    comes in takes the room of what that cell's backward gives up. Copies belong to the cell that they run beside: the
    one after the forward, the one before the backward.
    """
    stage = np.array(layout.placement.stages, np.int32)
    made = np.isin(cells.kind, (CellKind.F, CellKind.PAIR))
    used = np.isin(cells.kind, (CellKind.B, CellKind.I, CellKind.PAIR))
    when = np.full((2, schedule.pp, schedule.vpp, layout.num_mb), NEVER, np.int32)
    for side, (half, chosen) in enumerate(((Half.FORWARD, made), (Half.BACKWARD, used))):
        when[side, cells.rank[chosen], cells.chunk[half][chosen], cells.mb[half][chosen]] = cells.local[chosen]
    leaves = when[1] - when[0] > NEAR_CELLS

    def copies(half: Half, chosen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], ...]:
        """Return the cell, the place in it and the layers of its stage, for each copy of these cells' halves."""
        mine = np.flatnonzero(chosen & leaves[cells.rank, cells.chunk[half], cells.mb[half]])
        deep = np.array(layout.layers)[stage[cells.rank[mine], cells.chunk[half][mine]]]
        slot = np.arange(int(deep.sum())) - np.repeat(np.cumsum(deep) - deep, deep)
        return np.repeat(mine, deep), slot, np.repeat(deep, deep)

    cell, slot, _ = copies(Half.FORWARD, made)
    offloads = _on_own_lanes(cells, Half.FORWARD, OpKind.OFFLOAD, cell, slot)
    cell, slot, deep = copies(Half.BACKWARD, used)
    onloads = _on_own_lanes(cells, Half.BACKWARD, OpKind.ONLOAD, cell, deep - 1 - slot)
    return offloads, onloads, _slot_gate(cells, cell - 1, slot)


def _on_own_lanes(
    cells: Cells, half: Half, kind: OpKind, cell: npt.NDArray[np.intp], layer: npt.NDArray[np.intp]
) -> LaneColumns:
    """Return a lane for each rank with the copies of these cells' halves and layers."""
    pp = len(cells.first) - 1
    alone = np.full(pp, NEVER, np.int32)
    return LaneColumns(
        kind=np.full(len(cell), kind, np.uint8),
        mb=cells.mb[half][cell],
        chunk=cells.chunk[half][cell].astype(np.int16),
        layer=layer.astype(np.int16),
        cell=cells.local[cell] + np.int32(1 if half is Half.FORWARD else -1),
        num_ops=np.bincount(cells.rank[cell], minlength=pp),
        rank=np.arange(pp, dtype=np.int32),
        lane=np.full(pp, kind.lane, np.uint8),
        peer=alone,
        group=alone,
    )


def _slot_gate(cells: Cells, cell: npt.NDArray[np.intp], slot: npt.NDArray[np.intp]) -> Ints:
    """Return the compute op before a slot of a cell, or -1; compute lanes are the first, so it is an op's index too."""
    size = np.array([len(t.on(LaneKind.COMPUTE)) for t in cells.templates], np.int64)[cells.template]
    offset = np.cumsum(size) - size
    most = max(len(t.slots) for t in cells.templates)
    starts = np.array([[*t.slots, *[t.slots[-1]] * (most - len(t.slots))] for t in cells.templates])
    gate: Ints = (offset[cell] + starts[cells.template[cell], np.minimum(slot, most - 1)] - 1).astype(np.int32)
    return gate


def _channel_lanes(schedule: Schedule) -> LaneColumns:
    """Return sends in the order they are made, receives in the sender's order: as at the grain of cells."""
    coarse = lower_cells(schedule)
    first = schedule.pp  # a compute lane for each rank comes before
    ops = slice(int(coarse.lane_ptr[first]), None)
    return LaneColumns(
        kind=coarse.kind[ops],
        mb=coarse.mb[ops],
        chunk=coarse.chunk[ops],
        layer=coarse.layer[ops],
        cell=coarse.cell[ops],
        num_ops=np.diff(coarse.lane_ptr)[first:],
        rank=coarse.lane_rank[first:],
        lane=coarse.lane_kind[first:],
        peer=coarse.lane_peer[first:],
        group=coarse.lane_group[first:],
    )
