"""Memory of ranks over an execution: saved activations, from the forward that makes them on.

Each part of a layer saves something at its forward's start. The bytes are freed at the end of the wgrad (a
fraction at the end of the dgrad already), or of the backward where the two are not split. An offload frees a layer's
bytes at its end, an onload takes them at its start: all that the layer's forward saved, or as much of it as
`Layout.saved` has for the offload. At equal times freeing comes first.

At the grain of cells a forward saves what the blocks of its stage save, where they are known, so stages may differ.
What is saved may differ by stage and by micro-batch as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.blocks import LAYERS
from treadle.ir.execute import Times
from treadle.ir.kernel import kernel
from treadle.ir.ops import BLOCK_FORWARD, COMPUTE_PARTS, EXCHANGES, OpKind, OpPhase
from treadle.ir.program import Bytes, Ints, Layout, Longs, Program


class Peaks(NamedTuple):
    """The most bytes (or `Layout.saved_unit`) that each rank holds, and when it first does."""

    size: Longs
    time: Longs


class Changes(NamedTuple):
    """Bytes (or `Layout.saved_unit`) that ops take at their start and give back at their end.

    `taken[what]` and `given[what]`, where `what[op]` is the class of an op: its kind, where stages, layers and
    micro-batches do not differ, else a number for all that it depends on.
    """

    what: Bytes | Longs
    taken: Longs
    given: Longs


def per_unit(layout: Layout) -> int:
    """How much of `saved` makes one of its unit: the parts of a layer that compute count one each."""
    return len(COMPUTE_PARTS) if layout.saved_unit == "layers" and layout.by_layer else 1


def in_unit(layout: Layout, size: int) -> float:
    """Return what ops have saved, in the layout's `saved_unit`; an int where it is whole."""
    whole, rest = divmod(size, per_unit(layout))
    return whole if rest == 0 else size / per_unit(layout)


def changes(program: Program) -> Changes:
    """Return what each op takes at its start and gives back at its end."""
    layout = program.layout
    tables, number = _tables(layout)
    if len(tables) == 1 and not layout.mb_scale and not _layers_differ(layout):
        taken, given = _by_kind(layout, tables[0], dense=False, scale=tables[0].scale)
        return Changes(program.kind, taken, given)
    return _by_class(program, tables, number)


class _Saved(NamedTuple):
    """What the ops of a stage save: `saved` and `dense` by kind; which of its layers are dense; its scale."""

    saved: tuple[tuple[OpKind, int], ...]
    dense: tuple[tuple[OpKind, int], ...]
    dense_layers: tuple[bool, ...]
    scale: float


def _tables(layout: Layout) -> tuple[list[_Saved], Ints]:
    """Return the different stages, and the number of each stage's."""
    of_stage = []
    in_layer = (*layout.forward, *layout.recomputed, OpKind.OFFLOAD)
    for stage, row in enumerate(layout.blocks):
        saved = {kind: size for kind, size in layout.saved.items() if kind in (*in_layer, *BLOCK_FORWARD.values())}
        dense = {**saved, **{kind: size for kind, size in layout.dense_saved.items() if kind in in_layer}}
        dense = {kind: size for kind, size in dense.items() if kind not in EXCHANGES}
        if not layout.by_layer and row:
            saved[OpKind.F] = _of_cell(layout, row)
        in_row = tuple(letter == "d" for letter in row if letter in LAYERS) if _layers_differ(layout) else ()
        scale = layout.stage_scale[stage] if layout.stage_scale else 1.0
        of_stage.append(_Saved(tuple(saved.items()), tuple(dense.items()), in_row, scale))
    different = list(dict.fromkeys(of_stage))
    return different, np.array([different.index(stage) for stage in of_stage], np.int32)


def _layers_differ(layout: Layout) -> bool:
    """True if dense layers save something else than other layers."""
    return layout.by_layer and (bool(layout.dense_saved) or not layout.saved.keys().isdisjoint(EXCHANGES))


def _of_cell(layout: Layout, row: str) -> int:
    """Return what the blocks of a stage save together, at the grain of cells."""
    size = 0
    for block in row:
        if block in BLOCK_FORWARD:
            size += layout.saved.get(BLOCK_FORWARD[block], 0)
        elif block == "d":
            size += layout.dense_saved.get(OpKind.F, layout.saved.get(OpKind.F, 0))
        else:
            size += layout.saved.get(OpKind.F, 0)
    return size


def _by_class(program: Program, tables: list[_Saved], number: Ints) -> Changes:
    """Return changes by stage, by dense layer or not, by micro-batch, and by kind."""
    layout = program.layout
    pp = program.lane_rank[program.lane_of] // layout.num_replicas
    known = (program.chunk >= 0) & (program.chunk < layout.placement.vpp)
    chunk = np.where(known, program.chunk, 0)
    table = np.where(known, number[np.array(layout.placement.stages, np.int32)[pp, chunk]], 0).astype(np.int64)
    flags = np.zeros((len(tables), layout.max_layers), np.int64)
    for place, stage in enumerate(tables):
        flags[place, : len(stage.dense_layers)] = stage.dense_layers
    inside = (program.layer >= 0) & (program.layer < layout.max_layers)
    dense = np.where(inside, flags[table, np.where(inside, program.layer, 0)], 0)
    scales, mb = _scales(program, chunk)
    what = ((mb * len(tables) + table) * 2 + dense) * len(OpKind) + program.kind
    amounts = [
        _by_kind(layout, stage, dense=is_dense, scale=stage.scale * scale)
        for scale in scales
        for stage in tables
        for is_dense in (False, True)
    ]
    taken, given = (np.concatenate(side) for side in zip(*amounts, strict=True))
    return Changes(what, taken, given)


def _scales(program: Program, chunk: npt.NDArray[np.int16]) -> tuple[tuple[float, ...], Longs]:
    """Return the scales by micro-batch, and the micro-batch of each op among all pipes."""
    layout = program.layout
    if not layout.mb_scale:
        return (1.0,), np.zeros(program.num_ops, np.int64)
    inside = (program.mb >= 0) & (program.mb < layout.num_mb)
    pipe = np.array(layout.placement.pipes, np.int64)[chunk]
    return layout.mb_scale, np.where(inside, pipe * layout.num_mb + program.mb, 0)


def _by_kind(layout: Layout, stage: _Saved, *, dense: bool, scale: float) -> tuple[Longs, Longs]:
    taken, given = np.zeros(len(OpKind), np.int64), np.zeros(len(OpKind), np.int64)
    of_layer = 0
    for saver, bytes_saved in stage.dense if dense else stage.saved:
        if saver is OpKind.OFFLOAD:
            continue
        size = round(bytes_saved * scale)
        backward, weight = _readers(saver)
        taken[saver] = size
        split = weight is OpKind.W or weight in layout.weights
        kept = round(size * layout.kept) if split else 0
        if backward is not None:
            given[backward] += size - kept
        if weight is not None and split:
            given[weight] += kept
        if saver is OpKind.F:
            given[OpKind.B] = size
        of_layer += size if saver in layout.forward else 0
    out = of_layer
    if OpKind.OFFLOAD in layout.saved:
        moved = dict(stage.dense if dense else stage.saved)[OpKind.OFFLOAD]
        out = min(of_layer, round(moved * scale))
    taken[OpKind.ONLOAD] = given[OpKind.OFFLOAD] = out
    return taken, given


def _readers(saver: OpKind) -> tuple[OpKind | None, OpKind | None]:
    """The dgrad and the wgrad that read what an op saves; without a dgrad it is never given back."""
    phase = OpPhase.I if saver is OpKind.F else OpPhase.B
    return saver.in_phase(phase), saver.in_phase(OpPhase.W)


def peaks(program: Program, times: Times) -> Peaks:
    """Return the most that each rank holds at once."""
    order = np.argsort(program.lane_rank, kind="stable").astype(np.int32)
    rank_ptr = np.searchsorted(program.lane_rank[order], np.arange(program.num_ranks + 1))
    what, taken, given = changes(program)
    return Peaks(*_peaks(what, program.lane_ptr, order, rank_ptr, times.start, times.end, taken, given))


@kernel
def _peaks(
    kind: Bytes | Longs,
    lane_ptr: Longs,
    order: Ints,
    rank_ptr: Longs,
    start: Longs,
    end: Longs,
    taken: Longs,
    given: Longs,
) -> tuple[Longs, Longs]:
    """Merge each rank's lanes, whose ops are in order of time, two events an op."""
    num_ranks = len(rank_ptr) - 1
    size, time = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    most = 0
    for rank in range(num_ranks):
        most = max(most, rank_ptr[rank + 1] - rank_ptr[rank])
    taking, giving, stop = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    for rank in range(num_ranks):
        count = 0
        for k in range(rank_ptr[rank], rank_ptr[rank + 1]):
            lane = order[k]
            uses = False
            for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
                if taken[kind[op]] > 0 or given[kind[op]] > 0:
                    uses = True
                    break
            if not uses:
                continue
            taking[count] = giving[count] = lane_ptr[lane]
            stop[count] = lane_ptr[lane + 1]
            count += 1
        held = np.int64(0)
        while True:
            best, at, gives = -1, np.int64(0), False
            for k in range(count):
                while taking[k] < stop[k] and taken[kind[taking[k]]] == 0:
                    taking[k] += 1
                while giving[k] < stop[k] and given[kind[giving[k]]] == 0:
                    giving[k] += 1
                if giving[k] < stop[k] and (best < 0 or end[giving[k]] < at or (end[giving[k]] == at and not gives)):
                    best, at, gives = k, end[giving[k]], True
                if taking[k] < stop[k] and (best < 0 or start[taking[k]] < at):
                    best, at, gives = k, start[taking[k]], False
            if best < 0:
                break
            if gives:
                held -= given[kind[giving[best]]]
                giving[best] += 1
            else:
                held += taken[kind[taking[best]]]
                taking[best] += 1
                if held > size[rank]:
                    size[rank] = held
                    time[rank] = at
    return size, time
