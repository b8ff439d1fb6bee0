"""1F1B: fill the pipe, alternate one forward and one backward, drain.

    rank 0  F0 F1 F2 F3             B0 F4 B1 ...
    rank 1     F0 F1 F2          B0 F3 B1 F4 ...
    rank 2        F0 F1       B0 F2 B1 F3 ...
    rank 3           F0 B0 F1 B1 F2 B2 ...

The bubble of GPipe with the activations of at most P micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import B, Cell, F, Placement
from treadle.schedules.family import Family, Size, any_size


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Warm up until the first gradient can arrive, then a backward after each forward."""
    num_mb = size.microbatches
    warmup = min(size.pp - 1 - rank, num_mb)
    # 1. F: fill the pipe, one forward for each rank after it
    yield from (F(mb) for mb in range(warmup))
    # 2. (F B) steady
    for k in range(num_mb - warmup):
        yield F(warmup + k)
        yield B(k)
    # 3. B: drain
    yield from (B(mb) for mb in range(num_mb - warmup, num_mb))


FAMILY = Family(
    name="1f1b",
    summary="fill, alternate one forward and one backward, drain",
    source="PipeDream-Flush (arXiv 2006.09503)",
    placement=Placement.loop,
    row=row,
    refuse=any_size,
    vpps=(1,),
    demands="any P, V=1, any M",
    bubble="(P-1)(F+B)",
    memory="min(P, M) micro-batches",
    trainers=("Megatron-LM", "torch (Schedule1F1B)"),
)
