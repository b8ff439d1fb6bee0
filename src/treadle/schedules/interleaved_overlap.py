"""Interleaved 1F1B with one more warm-up, and overlapped cells: Kimi K2's schedule.

    rank 0  F0.0 F1.0 F0.1 F1.1 F2.0 (F3.0|B0.1) (F2.1|B1.1) ...      P = 2, V = 2
    rank 1       F0.0 F1.0 F0.1 (F1.1|B0.1) (F2.0|B1.1) ...

With one forward more in flight the forward and the backward next to each other are of different
micro-batches, so they can run together: each one's all-to-all hides behind the other's compute. The extra
warm-up must be on every rank: with none the last rank pairs a forward with its own backward, which is a
deadlock, and on the last rank alone it nearly doubles the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Cell, Pair, Placement
from treadle.schedules.family import Family, Size
from treadle.schedules.interleaved import num_warmup, order, refuse


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Interleaved with one warm-up more, its steady phase in pairs."""
    forwards, backwards = order(size)
    warmup = min(num_warmup(size, rank) + 1, len(forwards))
    num_steady = len(forwards) - warmup
    # 1. F: fill the pipe, one forward more than interleaved
    yield from forwards[:warmup]
    # 2. (F|B) steady: the forward and the backward of a pair are of different micro-batches
    yield from map(Pair, forwards[warmup:], backwards)
    # 3. B: drain
    yield from backwards[num_steady:]


FAMILY = Family(
    name="interleaved-overlap",
    summary="interleaved with one more warm-up and overlapped cells",
    source="Kimi K2 report (arXiv 2507.20534), Fig. 7",
    placement=Placement.loop,
    row=row,
    refuse=refuse,
    vpps=(),
    demands="any P, any V, M in max(1, M//P) equal groups",
    bubble="((P-1)(F+B) - 2(P-1-r)(F+B-FB))/V",
    memory="one chunk more than interleaved",
    trainers=("Megatron-LM (overlap_moe_expert_parallel_comm)",),
    overlapped=True,
)
