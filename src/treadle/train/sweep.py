"""The memory of each rank of a pipeline over a simulated step: what its ops take and give back, in order of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.ir.blocks import LAYERS
from treadle.ir.ops import RECEIVES, SENDS, OpKind, OpPart
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Trace
from treadle.train.footprint import BlockFootprint, ModelFootprint


@dataclass(frozen=True)
class StepPeak:
    """The moment of a step in which a rank has the most memory, in bytes, and the op that it runs then."""

    activations: int
    """What lives from op to op: saved for backward, passed from segment to segment, or on its way between stages."""

    temporaries: int
    """What ops have only while they run."""

    op: str

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.temporaries


def step_peaks(trace: Trace, rows: Sequence[str], model: ModelFootprint) -> tuple[StepPeak, ...]:
    """Return each rank's moment of most memory.

    Args:
        trace: a simulated step of one pipeline.
        rows: the block letters of each stage.
        model: the memory of the blocks.

    """
    program = trace.program
    sizes = _sizes(program, rows, model)
    index = _index(program, sizes.shape[0], sizes.shape[1])
    peak, after, freed = sizes.reshape(-1, 3)[index].T
    lasting = np.maximum(after, 0)
    starts = np.stack([lasting, peak - lasting])
    ends = np.stack([after - lasting - freed, lasting - peak])
    ranks = program.lane_rank[program.lane_of]
    return tuple(_peak_of(trace, np.flatnonzero(ranks == rank), starts, ends) for rank in range(program.num_ranks))


def _peak_of(trace: Trace, ops: Longs, starts: Longs, ends: Longs) -> StepPeak:
    """Return the peak of one rank; at equal times freeing comes first."""
    time = np.concatenate([trace.start[ops], trace.end[ops]])
    is_start = np.repeat([True, False], len(ops))
    order = np.lexsort((is_start, time))
    held = np.cumsum(np.concatenate([starts[:, ops], ends[:, ops]], axis=1)[:, order], axis=1)
    at = int(np.argmax(held.sum(axis=0)))
    op = trace.program.op(int(np.concatenate([ops, ops])[order[at]]))
    activations, temporaries = (int(size) for size in held[:, at])
    return StepPeak(activations, temporaries, str(op))


def _sizes(program: Program, rows: Sequence[str], model: ModelFootprint) -> Longs:
    """`[stage, layer, kind]`: (peak, after, freed at the end besides)."""
    depth = max(1, program.layout.max_layers, *(row.count("m") for row in rows))
    table = np.zeros((len(rows), depth, len(OpKind), 3), np.int64)
    for number, row in enumerate(rows):
        layers = [letter for letter in row if letter in LAYERS]
        for letter in dict.fromkeys(row):
            places = [at for at, other in enumerate(layers) if other == letter]
            if letter not in LAYERS:
                places = list(range(row.count(letter)))
            for at in places:
                _put_block(table[number, at], model.blocks[letter])
    for kind in RECEIVES:
        table[:, :, kind] = (model.boundary, model.boundary, 0)
    for kind in SENDS:
        table[:, :, kind] = (0, 0, model.boundary)
    return table


def _put_block(table: Longs, block: BlockFootprint) -> None:
    """Fill in `[kind]` of a block."""
    for kind, op in block.ops.items():
        table[kind] = (op.peak, op.after, 0)
    if block.letter in LAYERS:
        moved = block.saved_until_backward
        table[OpKind.OFFLOAD] = (0, 0, moved)
        table[OpKind.ONLOAD] = (moved, moved, 0)


def _index(program: Program, num_stages: int, depth: int) -> Longs:
    """Return the place of each op in the table of sizes."""
    layout = program.layout
    rank = program.lane_rank[program.lane_of] // layout.num_replicas
    known = (program.chunk >= 0) & (program.chunk < layout.placement.vpp)
    stage = np.array(layout.placement.stages, np.int64)[rank, np.where(known, program.chunk, 0)]
    once = [kind for kind in OpKind if kind.part in (OpPart.EMBED, OpPart.HEAD)]
    of_mtp = [kind for kind in OpKind if kind.part is OpPart.MTP]
    outside = np.isin(program.kind, once) | (program.layer < 0) | (program.layer >= depth)
    layer = np.where(outside & ~np.isin(program.kind, of_mtp), 0, program.layer)
    index: Longs = (stage * depth + layer) * len(OpKind) + program.kind
    return index
