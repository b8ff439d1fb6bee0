"""ZB-H1: 1F1B with the backward split, wgrad filling the bubble at the end.

    rank 0  F0 F1 F2 F3             I0 W0 F4 I1 W1 ...
    rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 ...

Only dgrad is on the way to the next rank. Rank r holds wgrad of r micro-batches back, so that every rank
keeps the memory of 1F1B's first.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Cell, F, I, Placement, W
from treadle.schedules.family import Family, Size, any_size


def row(size: Size, rank: int) -> Iterator[Cell]:
    """1F1B's order of forwards and dgrad, with W of micro-batch k-r after I of k."""
    num_mb = size.microbatches
    warmup = min(size.pp - 1 - rank, num_mb)
    # 1. F: fill the pipe, as 1F1B does
    yield from (F(mb) for mb in range(warmup))
    # 2. (F I W) steady, then (I W) without forwards; W starts r micro-batches late
    for k in range(num_mb):
        if warmup + k < num_mb:
            yield F(warmup + k)
        yield I(k)
        if k >= rank:
            yield W(k - rank)
    # 3. W: wgrad of the r micro-batches held back fills the end
    yield from (W(mb) for mb in range(max(0, num_mb - rank), num_mb))


FAMILY = Family(
    name="zb-h1",
    summary="1F1B with weight gradients split off and held back",
    source="Zero Bubble (arXiv 2401.10241)",
    placement=Placement.loop,
    row=row,
    refuse=any_size,
    vpps=(1,),
    demands="any P, V=1, any M",
    bubble="(P-1)(F+B-2W)",
    memory="min(P, M) micro-batches",
    trainers=("torch (ScheduleInterleavedZeroBubble with a stage a rank)",),
)
