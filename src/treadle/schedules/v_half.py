"""V-Half: half of 1F1B's memory on every rank, half of its bubble where F, I and W take the same time.

    rank 0  F0.0 F1.0      F0.1 I0.1 W0.1 F2.0      F1.1 I1.1 I0.0 W1.1 F3.0 W0.0 F2.1 I2.1 I1.0 ...      P = 2
    rank 1       F0.0 F0.1 F1.0      I0.1 W0.1 F1.1 F2.0 I0.0 W0.0 I1.1 W1.1 F2.1 F3.0 I1.0 W1.0 ...

Rank r holds stage r and stage 2P-1-r. A micro-batch takes two ticks a hop down the ranks and one back up, with F and
with I. So all ranks hold the same: what one has longer in chunk 0 it has shorter in chunk 1. The bubble does not grow
with M where 2I <= 2F + W and 2F <= 2I + W.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Cell, Placement
from treadle.schedules.building_block import BuildingBlock
from treadle.schedules.building_block import row as repeated
from treadle.schedules.family import Family, Size, any_size

HOPS = (2, 1, 2, 1)


def block(pp: int) -> BuildingBlock:
    """No rank has two passes in one tick; of the turns that achieve it, these wait least within the memory."""
    return BuildingBlock(HOPS, (1, 1, 2) if pp % 2 else (5, 1, 4))


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Repeat the building block with the activations of (P+2)//2 micro-batches, two chunks each."""
    return repeated(block(size.pp), 2 * ((size.pp + 2) // 2), size, rank)


FAMILY = Family(
    name="v-half",
    summary="two chunks in a V, half of 1F1B's memory",
    source="Controllable Memory (arXiv 2405.15362), V-Half",
    placement=Placement.v,
    row=row,
    refuse=any_size,
    vpps=(2,),
    demands="any P, V=2, any M",
    bubble="at most (3P-4)F/V where F=I=W and M >= P",
    memory="(P+2)//2 micro-batches",
)
