"""Costs applied to a Program: how many ticks each of its ops takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.costs.costs import Costs
from treadle.costs.unequal import mb_factors
from treadle.ir.blocks import LAYERS
from treadle.ir.execute import Ticks
from treadle.ir.kernel import kernel
from treadle.ir.ops import (
    ACTIONS,
    COMPUTE_PARTS,
    RECOMPUTE,
    WEIGHT_OF,
    LaneKind,
    OpKind,
    OpPhase,
    OpRole,
    column,
    of_parts,
    where,
)
from treadle.ir.program import Bools, Bytes, Ints, Layout, Longs, Program, Shorts

WHOLE = {backward: weight for weight, backward in WEIGHT_OF.items() if weight.role is OpRole.COMPUTE}
"""The wgrad that a backward includes unless it is split off."""
_SHARED = {
    "f": of_parts(OpPhase.F, COMPUTE_PARTS),
    "i": of_parts(OpPhase.B, reversed(COMPUTE_PARTS)),
    "w": of_parts(OpPhase.W, reversed(COMPUTE_PARTS)),
}
_COMPUTES: Bools = column(lambda kind: kind.lane is LaneKind.COMPUTE and kind.role is not OpRole.STEP_END, np.bool_)
"""`[kind]`: does a stage's factor multiply its time."""
_KEYS = {name: [(kind, kind.cost_key) for kind in where(cost=name)] for name in ("layer", "message", "ends", "step")}
"""The ops whose times a section of the costs has, and their keys."""


_MOST_TICKS = 2**62
"""The longest step that is computed: sums of ticks stay whole numbers of 64 bits."""


class _StageKind(NamedTuple):
    """All that the times of a stage's ops depend on: its row of blocks, empty where it does not matter; its factor."""

    row: str
    factor: float


class _Tables(NamedTuple):
    """`number[pp, chunk]` is a kind of stage; `ticks[stage kind, kind, layer]`; `pair[forward's, backward's]`.

    `of_mb[stage kind, micro-batch, kind]` multiplies a time; it has no micro-batches where all are alike.
    """

    number: Ints
    ticks: Longs
    pair: Longs
    of_mb: npt.NDArray[np.float64]


def ticks(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs | Ticks:
    """Return how long ops take, in the form that executes fastest. `slowness[rank]` multiplies all times of a rank.

    Raises:
        ValueError: the step may be longer than ticks can count.

    """
    layout = program.layout
    tables = _tables(layout, costs)
    _check_total(program, costs, tables, slowness)
    odd = program.layer.min(initial=0) < 0 or program.layer.max(initial=0) >= layout.max_numbers
    if len(tables.ticks) > 1 or odd or costs.microbatch:
        return _each(program, costs, tables, slowness)
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    return Ticks(np.ascontiguousarray(tables.ticks[0]), int(tables.pair[0, 0]), factor)


def durations(program: Program, costs: Costs, *, slowness: npt.NDArray[np.float64] | None = None) -> Longs:
    """Return the ticks of each op.

    Raises:
        ValueError: the step may be longer than ticks can count.

    """
    tables = _tables(program.layout, costs)
    _check_total(program, costs, tables, slowness)
    return _each(program, costs, tables, slowness)


def _check_total(program: Program, costs: Costs, tables: _Tables, slowness: npt.NDArray[np.float64] | None) -> None:
    """Refuse times whose sum over the ops of one replica, each at its slowest, passes what ticks count."""
    slowest = 1.0 if slowness is None else float(slowness.max(initial=1.0))
    slowest *= float(tables.of_mb.max(initial=1.0))
    longest = max(int(tables.ticks.max(initial=0)), int(tables.pair.max(initial=0)))
    num_ops = program.num_ops / max(1, program.layout.num_replicas)
    if num_ops * longest * slowest >= _MOST_TICKS:
        raise _too_long(costs, longest * slowest, f", there are {num_ops:,.0f} ops")


def _too_long(costs: Costs, longest: float, besides: str = "") -> ValueError:
    clock = costs.clock
    return ValueError(
        f"costs {costs.name!r} are too long to add up: an op takes up to {longest / clock.ticks:.3g} {clock.unit}"
        f"{besides}, and a step at most {_MOST_TICKS / clock.ticks:.3g}; look at the units of the costs, or of the "
        "cluster that they are estimated for"
    )


def _each(program: Program, costs: Costs, tables: _Tables, slowness: npt.NDArray[np.float64] | None) -> Longs:
    factor = np.ones(program.num_ranks) if slowness is None else slowness
    layout = program.layout
    return _durations(
        program.kind,
        program.mb,
        program.chunk,
        program.layer,
        program.joined,
        program.lane_ptr,
        program.lane_rank // layout.num_replicas,
        program.lane_rank,
        *tables,
        factor,
        np.array(layout.placement.pipes, np.int64) * layout.num_mb,
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
    try:
        ticks = np.stack([_table(layout, costs, kind) for kind in different])
        pair = np.array([[_pair(layout, costs, f, b) for b in different] for f in different], np.int64)
    except OverflowError:
        raise _too_long(costs, float(_MOST_TICKS)) from None
    of_mb = np.stack([mb_factors(layout, costs, kind.row) for kind in different])
    alike = (ticks == ticks[0]).all() and (pair == pair[0, 0]).all() and (of_mb == of_mb[0]).all()
    if len(different) > 1 and alike:
        return _Tables(np.zeros_like(number), ticks[:1], pair[:1, :1], of_mb[:1])
    return _Tables(number, ticks, pair, of_mb)


def _stage_kinds(layout: Layout, costs: Costs) -> list[_StageKind]:
    num_stages = len(layout.blocks)
    factors = costs.stage_factors("factor", num_stages) if not layout.is_update else ()
    matters = layout.model_layers > 0
    return [
        _StageKind(row if matters else "", factor)
        for row, factor in zip(layout.blocks, factors or (1.0,) * num_stages, strict=True)
    ]


def _pair(layout: Layout, costs: Costs, forward: _StageKind, backward: _StageKind) -> int:
    """An overlapped cell. Layers overlap one by one; what one stage has more of runs alone, and so do other blocks."""
    if layout.by_layer:
        return 0
    if not layout.model_layers:
        return round(costs.cell("fb") * (forward.factor + backward.factor) / 2)
    one, two = ([block for block in stage.row if block in LAYERS] for stage in (forward, backward))
    both = min(len(one), len(two))
    saved = sum(
        costs.of_layer("f", f) + costs.of_layer("b", b) - _overlapped(costs, f, b)
        for f, b in zip(one[:both], reversed(two[:both]), strict=True)
    )
    alone = costs.of_stage("f", forward.row) * forward.factor + costs.of_stage("b", backward.row) * backward.factor
    return round(alone - saved * (forward.factor + backward.factor) / 2)


def _overlapped(costs: Costs, forward: str, backward: str) -> int:
    """A layer's forward with a layer's backward; what the costs say of it is about two layers that are alike."""
    if forward == backward:
        return costs.of_layer("fb", forward)
    return (costs.of_layer("fb", forward) + costs.of_layer("fb", backward)) // 2


def _table(layout: Layout, costs: Costs, stage: _StageKind) -> Longs:
    """`[kind, layer]` -> ticks."""
    table = np.zeros((len(OpKind), layout.max_numbers), np.int64)
    held = layout.model_layers and not layout.by_layer
    for kind in ACTIONS:
        table[kind] = costs.of_stage(kind.cost_key, stage.row) if held else costs.cell(kind.cost_key)
    for section, times in (("message", costs.message), ("ends", costs.ends), ("step", costs.step)):
        for kind, key in _KEYS[section]:
            table[kind] = times.get(key, 0)
    if layout.by_layer:
        _fill_layers(table, costs, stage.row)
    for backward, weight in WHOLE.items():
        if layout.by_layer and weight not in layout.weights:
            table[backward] += table[weight]
    if stage.factor != 1.0:
        scaled = np.rint(table[_COMPUTES] * stage.factor)
        if scaled.max(initial=0) >= _MOST_TICKS:
            raise OverflowError
        table[_COMPUTES] = scaled.astype(np.int64)
    return table


def _fill_layers(table: Longs, costs: Costs, row: str) -> None:
    """The parts of layers, which are alike but for dense ones."""
    for part, key in _KEYS["layer"]:
        table[part] = costs.layer.get(key, 0)
    layers = [block for block in row if block in LAYERS]
    if not costs.has_parts:
        _share_out(table, costs, len(layers))
    for layer, block in enumerate(layers):
        if block == "d" and costs.dense:
            _fill_dense(table, costs, layer)
    for again, forward in RECOMPUTE.items():
        table[again] = table[forward]
        name = again.cost_key
        for layer, block in enumerate(layers):
            if block == "d" and name in costs.dense:
                table[again, layer] = costs.dense[name]
            elif name in costs.layer and not (block == "d" and forward.cost_key in costs.dense):
                table[again, layer] = costs.layer[name]


def _fill_dense(table: Longs, costs: Costs, layer: int) -> None:
    for action, parts in _SHARED.items():
        names = [part.cost_key for part in parts]
        if any(name in costs.dense for name in names):
            for part, name in zip(parts, names, strict=True):
                table[part, layer] = costs.dense.get(name, table[part, layer])
        elif action in costs.dense:
            for share, part in enumerate(parts):
                table[part, layer] = _share(costs.dense[action], share, len(parts))


def _share_out(table: Longs, costs: Costs, depth: int) -> None:
    """What a layer takes, or a chunk over all its layers, over attention and MLP, to the tick."""
    for name, parts in _SHARED.items():
        whole, num = (costs.of_layer(name), 1) if costs.says_layers else (costs.cell(name), max(1, depth))
        shares = num * len(parts)
        for share in range(shares):
            layer, part = divmod(share, len(parts))
            place = slice(None) if costs.says_layers else layer
            table[parts[part], place] = _share(whole, share, shares)


def _share(whole: int, share: int, shares: int) -> int:
    """One of `shares` parts of a whole, which add up to it."""
    return whole * (share + 1) // shares - whole * share // shares


@kernel
def _durations(
    kind: Bytes,
    mb: Ints,
    chunk: Shorts,
    layer: Shorts,
    joined: Bools,
    lane_ptr: Longs,
    lane_pp: Ints,
    lane_rank: Ints,
    number: Ints,
    table: Longs,
    pair: Longs,
    of_mb: npt.NDArray[np.float64],
    factor: npt.NDArray[np.float64],
    first_mb: Longs,
) -> Longs:
    """`first_mb[chunk]` is the number of its pipe's first micro-batch."""
    dur = np.empty(len(kind), np.int64)
    for lane in range(len(lane_rank)):
        slow = factor[lane_rank[lane]]
        numbers = number[lane_pp[lane]]
        before = 0  # the kind of stage of the op before
        alone = 0.0  # and what it would take by itself, with its factors and without
        plain = 0
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            held = 0 <= chunk[op] < len(numbers)
            stage = numbers[chunk[op]] if held else 0
            ticks = table[stage, kind[op], layer[op]] if held and 0 <= layer[op] < table.shape[2] else 0
            times = slow
            if held and mb[op] >= 0 and first_mb[chunk[op]] + mb[op] < of_mb.shape[1]:
                times = slow * of_mb[stage, first_mb[chunk[op]] + mb[op], kind[op]]
            dur[op] = ticks if times == 1.0 else round(ticks * times)
            if joined[op]:
                both = pair[stage, before] if kind[op] == 0 else pair[before, stage]  # 0 is OpKind.F
                total = plain + ticks
                share = (alone + ticks * times) / total if total > 0 else slow
                dur[op] = dur[op - 1] = both if share == 1.0 else round(both * share)
            before, alone, plain = stage, ticks * times, ticks
    return dur
