"""V-Min: a third of 1F1B's memory on every rank, two thirds of its bubble where F, I and W take the same time.

    rank 0  F0.0           F0.1 I0.1 W0.1 F1.0 I0.0 W0.0 F1.1 I1.1 W1.1 F2.0 I1.0 W1.0 F2.1 ...      P = 2
    rank 1       F0.0 F0.1           I0.1 I0.0 F1.0 F1.1 W0.1 W0.0 I1.1 I1.0 F2.0 F2.1 W1.1 ...

Rank r holds stage r and stage 2P-1-r. A micro-batch takes one tick a hop both ways, so no schedule brings it back
sooner. Nothing is left to even times out: where F, I and W differ, ranks wait for each micro-batch, and V-Half waits
less.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Cell, Placement
from treadle.schedules.building_block import BuildingBlock
from treadle.schedules.building_block import row as repeated
from treadle.schedules.family import Family, Size, any_size

HOPS = (1, 1, 1, 1)


def block(pp: int) -> BuildingBlock:
    """No rank has two passes in one tick: turns of one tick achieve that unless 3 divides P."""
    return BuildingBlock(HOPS, (1, 1, 1) if pp % 3 else (3, 1, 3))


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Repeat the building block with the activations of (P+4)//3 micro-batches, two chunks each."""
    return repeated(block(size.pp), 2 * ((size.pp + 4) // 3), size, rank)


FAMILY = Family(
    name="v-min",
    summary="two chunks in a V, a third of 1F1B's memory",
    source="Controllable Memory (arXiv 2405.15362), V-Min",
    placement=Placement.v,
    row=row,
    refuse=any_size,
    vpps=(2,),
    demands="any P, V=2, any M",
    bubble="(4P-5)F/V where F=I=W",
    memory="(P+4)//3 micro-batches",
    regular=False,
)
