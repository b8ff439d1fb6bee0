"""Costs applied to a Program: how many ticks each of its ops takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.costs.costs import Costs
from treadle.ir.execute import Ticks
from treadle.ir.kernel import kernel
from treadle.ir.program import EMBEDDING, HEAD, Bools, Bytes, Ints, Layout, Longs, OpKind, Program, Shorts

_WHOLE = {OpKind.MLP_B: OpKind.MLP_W, OpKind.ATTN_B: OpKind.ATTN_W, OpKind.HEAD_B: OpKind.HEAD_W}
"""The weight half that a backward includes unless it is split off."""
_SHARED = {
    "f": (OpKind.ATTN_F, OpKind.MLP_F),
    "i": (OpKind.MLP_B, OpKind.ATTN_B),
    "w": (OpKind.MLP_W, OpKind.ATTN_W),
}


def ticks(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs | Ticks:
    """Return how long ops take, in the form that executes fastest. `slowness[rank]` multiplies all times of a rank."""
    layout = program.layout
    by_stage = len(set(layout.layers)) > 1 and not costs.layer  # shares of a chunk depend on how deep its stage is
    odd = program.layer.min(initial=0) < 0 or program.layer.max(initial=0) >= layout.max_layers
    if by_stage or odd:
        return durations(program, costs, slowness=slowness)
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    return Ticks(np.ascontiguousarray(_table(layout, costs)[layout.max_layers]), _pair(layout, costs), factor)


def durations(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs:
    """Return the ticks of each op."""
    layout = program.layout
    stages = np.array(layout.placement.stages, np.int32)
    depth = np.array(layout.layers, np.int32)[stages]
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    return _durations(
        program.kind,
        program.chunk,
        program.layer,
        program.joined,
        program.lane_ptr,
        program.lane_rank // layout.num_replicas,
        program.lane_rank,
        depth,
        _table(layout, costs),
        _pair(layout, costs),
        factor,
    )


def _pair(layout: Layout, costs: Costs) -> int:
    return costs.cell("fb") if not layout.by_layer else 0


def _table(layout: Layout, costs: Costs) -> Longs:
    """`[layers of the stage, kind, layer]` -> ticks."""
    table = np.zeros((layout.max_layers + 1, len(OpKind), layout.max_layers), np.int64)
    for kind in (OpKind.F, OpKind.B, OpKind.I, OpKind.W):
        table[:, kind] = costs.cell(kind.name.lower())
    for kind in (OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B):
        table[:, kind] = costs.message.get("send", 0)
    for kind in (OpKind.OFFLOAD, OpKind.ONLOAD, OpKind.REDUCE_GRAD):
        table[:, kind] = costs.message.get(kind.name.lower(), 0)
    for kind in (*EMBEDDING, *HEAD):
        table[:, kind] = costs.ends.get(kind.name.lower(), 0)
    if costs.layer:
        for part in range(OpKind.ATTN_F, OpKind.ATTN_W + 1):
            table[:, part] = costs.layer.get(OpKind(part).name.lower(), 0)
    else:
        _share_out(table, costs)
    for backward, weight in _WHOLE.items():
        if layout.by_layer and weight not in layout.weights:
            table[:, backward] += table[:, weight]
    return table


def _share_out(table: Longs, costs: Costs) -> None:
    """A chunk's f, i and w over the compute parts of its layers, to the tick."""
    for depth in range(1, len(table)):
        for name, parts in _SHARED.items():
            total, num = costs.cell(name), depth * len(parts)
            for share in range(num):
                layer, part = divmod(share, len(parts))
                table[depth, parts[part], layer] = total * (share + 1) // num - total * share // num


@kernel
def _durations(
    kind: Bytes,
    chunk: Shorts,
    layer: Shorts,
    joined: Bools,
    lane_ptr: Longs,
    lane_pp: Ints,
    lane_rank: Ints,
    depth: Ints,
    table: Longs,
    pair: int,
    factor: npt.NDArray[np.float64],
) -> Longs:
    dur = np.empty(len(kind), np.int64)
    for lane in range(len(lane_rank)):
        slow = factor[lane_rank[lane]]
        depths = depth[lane_pp[lane]]
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            known = 0 <= chunk[op] < len(depths) and 0 <= layer[op] < table.shape[2]
            ticks = table[depths[chunk[op]], kind[op], layer[op]] if known else 0
            dur[op] = ticks if slow == 1.0 else round(ticks * slow)
            if joined[op]:
                dur[op] = dur[op - 1] = pair if slow == 1.0 else round(pair * slow)
    return dur
