"""All passes in a row, with the choices among them made by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from treadle.costs import Costs, ticks
from treadle.costs.unequal import mb_saved
from treadle.ir import Action, Cell, Schedule
from treadle.ir.ops import (
    BLOCK_FORWARD,
    BUCKET_OPS,
    COMPUTE_PARTS,
    KIND_OF,
    MOVES_BYTES,
    RECOMPUTE,
    OpKind,
    OpPhase,
    by_part,
    of_parts,
)
from treadle.ir.program import Program
from treadle.lowering.options import WHOLE_CELLS, LoweringOptions
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.layers import Shape
from treadle.passes.mesh import spread
from treadle.passes.step_end import reduces
from treadle.simulator import simulate

_RECOMPUTE = by_part(OpPhase.R)
_SAVERS = of_parts(OpPhase.F, COMPUTE_PARTS)

_SAMPLE_MICROBATCHES = 8
"""The fewest over which choices are compared: the middle of a step must outweigh its ends."""


def lower(schedule: Schedule, costs: Costs, options: LoweringOptions = WHOLE_CELLS) -> Program:
    """Lower a schedule to a Program: ops on lanes, with what they wait for.

    Args:
        schedule: verified or not.
        costs: durations, by which launches are ordered and `hold` and `early` are chosen, and sizes in bytes.
        options: by default whole cells.

    Raises:
        ValueError: options do not fit the schedule.

    Example:
        >>> schedule, costs = treadle.generate("1f1b", pp=2, microbatches=4), treadle.load_costs("deepseek-v3-h800")
        >>> lower(schedule, costs, LoweringOptions(layers=1, moe=True)).num_ranks
        2

    """
    if not options.is_by_layer(costs):
        program = _with_blocks(lower_cells(schedule), schedule, costs, options)
    else:
        shape = choose(schedule, costs, options)
        reduce = reduces(schedule.placement, options.ep * options.dp)
        program = lower_layers(schedule, shape, reduce=reduce, gather=reduce and bool(shape.buckets))
        program = order_launches(program, ticks(program, costs))
    return spread(program, ep=options.ep, dp=options.dp) if options.every_gpu else program


def _with_blocks(program: Program, schedule: Schedule, costs: Costs, options: LoweringOptions) -> Program:
    """Tell a Program at the grain of cells the blocks of its stages, and what each saves."""
    blocks = options.cut(schedule, costs)
    layout = replace(program.layout, blocks=blocks)
    if not any(blocks):
        return replace(program, layout=layout)
    saved, dense, unit = _saved(costs, options, blocks)
    if unit == "layers":
        return replace(program, layout=replace(layout, saved={OpKind.F: 1}, saved_unit=unit))
    of_layer, of_dense = ({OpKind.F: sum(sizes.pop(kind) for kind in _SAVERS)} for sizes in (saved, dense))
    different = of_dense if of_dense != of_layer else {}
    layout = replace(
        layout,
        saved={**of_layer, **saved},
        dense_saved=different,
        saved_unit=unit,
        stage_scale=costs.stage_factors("saved_factor", len(blocks)),
        mb_scale=mb_saved(schedule.num_microbatches, costs),
    )
    return replace(program, layout=layout)


def choose(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    """Return the shape with wgrads, and what is recomputed, where the step is shortest.

    Whether holding one back pays depends on what it has to hide: it gains where a backward's first all-to-all leaves
    compute idle, and loses where pipeline messages are slow. So each choice is simulated, over the first micro-batches.
    """
    shape = _shape(schedule, costs, options)
    can_split = OpKind.ATTN_W in options.split
    holds = (False, True) if options.hold is None and can_split else (bool(options.hold),)
    earlies = (False, True) if options.early is None and options.split else (bool(options.early),)
    agains = (
        (False, True) if options.early_recompute is None and options.recompute else (bool(options.early_recompute),)
    )
    shapes = [
        replace(shape, hold_attn_w=hold, early_mlp_w=early, early_recompute=again)
        for hold, early, again in product(holds, earlies, agains)
    ]
    if len(shapes) == 1:
        return shapes[0]
    alike = not costs.microbatch
    sample = first_microbatches(schedule, max(_SAMPLE_MICROBATCHES, 2 * schedule.pp)) if alike else schedule
    reduce = reduces(sample.placement, 1)
    return min(shapes, key=lambda candidate: simulate(lower_layers(sample, candidate, reduce=reduce), costs).makespan)


def _shape(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    blocks = options.cut(schedule, costs)
    saved, dense, unit = _saved(costs, options, blocks)
    num_stages = schedule.placement.num_stages
    buckets = options.cut_buckets(blocks)
    return Shape(
        blocks=blocks,
        moe=options.moe,
        counts=not options.padded,
        split=options.split,
        recompute=tuple(_RECOMPUTE[part] for part in options.recompute),
        offload=options.offload,
        saved=saved,
        dense_saved={kind: size for kind, size in dense.items() if saved[kind] != size},
        moved={kind: costs.message_bytes(kind) for kind in MOVES_BYTES},
        kept=options.kept,
        saved_unit=unit,
        tied=tuple(options.cut_ties(num_stages)),
        step_end=tuple(kind for kind in costs.step_end if not (buckets and kind in BUCKET_OPS)),
        buckets=buckets,
        stage_scale=costs.stage_factors("saved_factor", num_stages) if unit == "bytes" else (),
        mb_scale=mb_saved(schedule.num_microbatches, costs) if unit == "bytes" else (),
    )


def with_saved(program: Program, costs: Costs, options: LoweringOptions) -> Program:
    """Tell a Program at the grain of layers what its ops save under other costs than those it was lowered with."""
    saved, dense, unit = _saved(costs, options, program.layout.blocks)
    different = {kind: size for kind, size in dense.items() if saved[kind] != size}
    return replace(program, layout=replace(program.layout, saved=saved, dense_saved=different, saved_unit=unit))


def _saved(
    costs: Costs, options: LoweringOptions, blocks: tuple[str, ...]
) -> tuple[dict[OpKind, int], dict[OpKind, int], str]:
    """What ops save, what they save in dense layers, and the unit: bytes if the costs say them for every part."""
    letters = "".join(blocks)
    if costs.unsaved(letters):
        return _counted(options)
    sizes = costs.saved_parts
    saved = _parts_saved(sizes, options.recompute, "")
    dense = _parts_saved(sizes, options.recompute, "dense_")
    if options.offload and "offload" in sizes:
        saved[OpKind.OFFLOAD] = sizes["offload"]
        dense[OpKind.OFFLOAD] = sizes.get("dense_offload", sizes["offload"])
    saved |= {kind: sizes[str(kind.part)] for block, kind in BLOCK_FORWARD.items() if block in letters}
    return saved, dense, "bytes"


def _counted(options: LoweringOptions) -> tuple[dict[OpKind, int], dict[OpKind, int], str]:
    """Layers are counted: a part is half of one; one that is recomputed counts from then on."""
    saved = dict.fromkeys(_SAVERS, 1)
    for part in options.recompute:
        again = _RECOMPUTE[part]
        saved[RECOMPUTE[again]], saved[again] = 0, 1
    return saved, dict(saved), "layers"


def _parts_saved(sizes: Mapping[str, int], recompute: tuple[str, ...], prefix: str) -> dict[OpKind, int]:
    """What attention and MLP save; where one is recomputed, its inputs first and the rest then."""
    saved = {}
    for part in COMPUTE_PARTS:
        forward, again = KIND_OF[part, OpPhase.F], _RECOMPUTE.get(part)
        whole = sizes.get(f"{prefix}{part}", sizes.get(part, 0))
        kept = sizes.get(f"{prefix}{part}_input", sizes.get(f"{part}_input", 0))
        if again is not None and part in recompute:
            saved[forward], saved[again] = min(kept, whole), whole - min(kept, whole)
        else:
            saved[forward] = whole
    return saved


def first_microbatches(schedule: Schedule, num_mb: int) -> Schedule:
    """Keep only the first micro-batches of each pipe, in the order they have."""
    if schedule.microbatches_per_pipe <= num_mb:
        return schedule

    def kept(cell: Cell) -> list[Cell]:
        inside = [action for action in cell.actions if action.mb < num_mb]
        return [cell] if len(inside) == len(cell.actions) else list[Cell | Action](inside)

    columns = schedule.columns
    chosen = np.flatnonzero(columns.mb < num_mb)
    of_rank = np.split(columns.cell[chosen], np.searchsorted(columns.rank[chosen], np.arange(1, schedule.pp)))
    rows = tuple(
        tuple(part for cell in dict.fromkeys(cells.tolist()) for part in kept(row[cell]))
        for row, cells in zip(schedule.rows, of_rank, strict=True)
    )
    return replace(schedule, rows=rows, num_microbatches=num_mb * schedule.placement.num_pipes, receives={}, issue=())
