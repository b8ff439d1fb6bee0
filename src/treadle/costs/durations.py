"""Costs applied to a Program: how many ticks each of its ops takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.costs.costs import Costs
from treadle.ir.execute import Ticks
from treadle.ir.kernel import kernel
from treadle.ir.program import EMBEDDING, HEAD, Bools, Bytes, Ints, Layout, Longs, OpKind, Program, Shorts

WHOLE = {OpKind.MLP_B: OpKind.MLP_W, OpKind.ATTN_B: OpKind.ATTN_W, OpKind.HEAD_B: OpKind.HEAD_W}
"""The weight half that a backward includes unless it is split off."""
_SHARED = {
    "f": (OpKind.ATTN_F, OpKind.MLP_F),
    "i": (OpKind.MLP_B, OpKind.ATTN_B),
    "w": (OpKind.MLP_W, OpKind.ATTN_W),
}


class _StageKind(NamedTuple):
    """All that the times of a stage's ops depend on. `layers` is 0 where times do not depend on them."""

    layers: int
    first: bool
    last: bool


class _Tables(NamedTuple):
    """`number[pp, chunk]` is a kind of stage; `ticks[stage kind, kind, layer]`; `pair[forward's, backward's]`."""

    number: Ints
    ticks: Longs
    pair: Longs


def ticks(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs | Ticks:
    """Return how long ops take, in the form that executes fastest. `slowness[rank]` multiplies all times of a rank."""
    layout = program.layout
    tables = _tables(layout, costs)
    odd = program.layer.min(initial=0) < 0 or program.layer.max(initial=0) >= layout.max_layers
    if len(tables.ticks) > 1 or odd:
        return _each(program, tables, slowness)
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    return Ticks(np.ascontiguousarray(tables.ticks[0]), int(tables.pair[0, 0]), factor)


def durations(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs:
    """Return the ticks of each op."""
    return _each(program, _tables(program.layout, costs), slowness)


def _each(program: Program, tables: _Tables, slowness: npt.NDArray[np.float64] | None) -> Longs:
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    return _durations(
        program.kind,
        program.chunk,
        program.layer,
        program.joined,
        program.lane_ptr,
        program.lane_rank // program.layout.num_replicas,
        program.lane_rank,
        *tables,
        factor,
    )


def _tables(layout: Layout, costs: Costs) -> _Tables:
    if costs.model and not costs.cells and not layout.model_layers and not layout.is_update:
        raise ValueError(
            f"costs {costs.name!r} say what a model of {costs.model['layers']} layers takes, and this program does not "
            "know the layers of its stages; lower its schedule with these costs"
        )
    kinds = _stage_kinds(layout, costs)
    different = list(dict.fromkeys(kinds))
    number = np.array([different.index(kind) for kind in kinds], np.int32)[np.array(layout.placement.stages)]
    ticks = np.stack([_table(layout, costs, kind) for kind in different])
    pair = np.array([[_pair(layout, costs, f, b) for b in different] for f in different], np.int64)
    return _Tables(number, ticks, pair)


def _stage_kinds(layout: Layout, costs: Costs) -> list[_StageKind]:
    alike = _StageKind(0, False, False)
    if not layout.by_layer and layout.model_layers:
        last = len(layout.layers) - 1
        ends = bool(costs.ends)
        return [_StageKind(n, ends and s == 0, ends and s == last) for s, n in enumerate(layout.layers)]
    if layout.by_layer and not costs.says_layers:  # shares of a chunk depend on how deep its stage is
        return [_StageKind(layers, False, False) for layers in layout.layers]
    return [alike] * len(layout.layers)


def _pair(layout: Layout, costs: Costs, forward: _StageKind, backward: _StageKind) -> int:
    """An overlapped cell. Layers overlap one by one; what one stage has more of runs alone, and so do the ends."""
    if layout.by_layer:
        return 0
    if not layout.model_layers:
        return costs.cell("fb")
    both = min(forward.layers, backward.layers)
    alone = costs.of_stage("f", forward.layers - both, first=forward.first, last=forward.last)
    alone += costs.of_stage("b", backward.layers - both, first=backward.first, last=backward.last)
    return both * costs.of_layer("fb") + alone


def _table(layout: Layout, costs: Costs, stage: _StageKind) -> Longs:
    """`[kind, layer]` -> ticks."""
    table = np.zeros((len(OpKind), layout.max_layers), np.int64)
    for kind in (OpKind.F, OpKind.B, OpKind.I, OpKind.W):
        name = kind.name.lower()
        held = layout.model_layers and not layout.by_layer
        table[kind] = (
            costs.of_stage(name, stage.layers, first=stage.first, last=stage.last) if held else costs.cell(name)
        )
    for kind in (OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B):
        table[kind] = costs.message.get("send", 0)
    for kind in (OpKind.OFFLOAD, OpKind.ONLOAD, OpKind.REDUCE_GRAD):
        table[kind] = costs.message.get(kind.name.lower(), 0)
    for kind in (*EMBEDDING, *HEAD):
        table[kind] = costs.ends.get(kind.name.lower(), 0)
    for part in range(OpKind.ATTN_F, OpKind.ATTN_W + 1):
        table[part] = costs.layer.get(OpKind(part).name.lower(), 0)
    if not costs.has_parts:
        _share_out(table, costs, stage.layers)
    for backward, weight in WHOLE.items():
        if layout.by_layer and weight not in layout.weights:
            table[backward] += table[weight]
    return table


def _share_out(table: Longs, costs: Costs, depth: int) -> None:
    """What a layer takes, or a chunk over all its layers, over attention and MLP, to the tick."""
    for name, parts in _SHARED.items():
        whole, num = (costs.of_layer(name), 1) if costs.says_layers else (costs.cell(name), max(1, depth))
        shares = num * len(parts)
        for share in range(shares):
            layer, part = divmod(share, len(parts))
            where = slice(None) if costs.says_layers else layer
            table[parts[part], where] = whole * (share + 1) // shares - whole * share // shares


@kernel
def _durations(
    kind: Bytes,
    chunk: Shorts,
    layer: Shorts,
    joined: Bools,
    lane_ptr: Longs,
    lane_pp: Ints,
    lane_rank: Ints,
    number: Ints,
    table: Longs,
    pair: Longs,
    factor: npt.NDArray[np.float64],
) -> Longs:
    dur = np.empty(len(kind), np.int64)
    for lane in range(len(lane_rank)):
        slow = factor[lane_rank[lane]]
        numbers = number[lane_pp[lane]]
        before = 0  # the kind of stage of the op before
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            held = 0 <= chunk[op] < len(numbers)
            stage = numbers[chunk[op]] if held else 0
            ticks = table[stage, kind[op], layer[op]] if held and 0 <= layer[op] < table.shape[2] else 0
            dur[op] = ticks if slow == 1.0 else round(ticks * slow)
            if joined[op]:
                both = pair[stage, before] if kind[op] == 0 else pair[before, stage]  # 0 is OpKind.F
                dur[op] = dur[op - 1] = both if slow == 1.0 else round(both * slow)
            before = stage
    return dur
