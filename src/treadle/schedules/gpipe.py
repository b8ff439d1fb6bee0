"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 F3                B0 B1 B2 B3
    rank 1     F0 F1 F2 F3          B0 B1 B2 B3
    rank 2        F0 F1 F2 F3    B0 B1 B2 B3
    rank 3           F0 F1 F2 F3 B0 B1 B2 B3

Every micro-batch's activations are alive in the middle: the schedule the others improve on.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import B, Cell, F, Placement
from treadle.schedules.family import Family, Size, any_size


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Yield the cells of a rank; all ranks have the same."""
    del rank
    # 1. F: all micro-batches forward
    yield from (F(mb) for mb in range(size.microbatches))
    # 2. B: all micro-batches backward
    yield from (B(mb) for mb in range(size.microbatches))


FAMILY = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    source="GPipe (arXiv 1811.06965)",
    placement=Placement.loop,
    row=row,
    refuse=any_size,
    vpps=(1,),
    demands="any P, V=1, any M",
    bubble="(P-1)(F+B)",
    memory="M micro-batches",
    trainers=("torch (ScheduleGPipe)",),
    searched=False,
)
