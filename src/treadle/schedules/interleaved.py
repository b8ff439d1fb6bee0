"""Interleaved 1F1B: several chunks a rank, so that the pipe fills with smaller pieces.

    rank 0  F0.0 F1.0 F0.1 F1.1 F2.0      B0.1 F3.0 B1.1 F2.1 B0.0 ...      P = 2, V = 2
    rank 1       F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 ...

Micro-batches go through in groups: a whole group through chunk 0, then through chunk 1, and so on, backward
in the opposite order of chunks. A group has P micro-batches, or as near to it as divides M.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from treadle.ir import Action, B, Cell, F, Placement
from treadle.schedules.family import Family, Size


def group_size(size: Size) -> int:
    """Micro-batches that pass through a chunk before the next chunk's turn: P where P divides M."""
    return size.microbatches // max(1, size.microbatches // size.pp)


def refuse(size: Size) -> str | None:
    """M must divide into groups of one size, none smaller than the pipe unless there is one group."""
    num_groups = max(1, size.microbatches // size.pp)
    if size.microbatches % num_groups:
        return f"runs micro-batches in {num_groups} equal groups of at least P"
    return None


@lru_cache(maxsize=2)
def order(size: Size) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """All forwards and all backwards of a rank, each in the order they run; the same on every rank, so made once."""
    group, chunks = group_size(size), range(size.vpp)
    starts = range(0, size.microbatches, group)
    forwards = tuple(F(s + k, c) for s in starts for c in chunks for k in range(group))
    backwards = tuple(B(s + k, c) for s in starts for c in reversed(chunks) for k in range(group))
    return forwards, backwards


def num_warmup(size: Size, rank: int) -> int:
    """Forwards before the first backward can run: two for each rank after it, and a group for each chunk but one."""
    return 2 * (size.pp - 1 - rank) + (size.vpp - 1) * group_size(size)


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Warm up, then one forward and one backward at a time, then the backwards left over."""
    forwards, backwards = order(size)
    warmup = min(num_warmup(size, rank), len(forwards))
    num_steady = len(forwards) - warmup
    # 1. F: fill the pipe, in groups through one chunk after the other
    yield from forwards[:warmup]
    # 2. (F B) steady
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    # 3. B: drain
    yield from backwards[num_steady:]


FAMILY = Family(
    name="interleaved",
    summary="1F1B over several chunks a rank",
    source="Megatron-LM (arXiv 2104.04473)",
    placement=Placement.loop,
    row=row,
    refuse=refuse,
    vpps=(),
    demands="any P, any V, M in max(1, M//P) equal groups",
    bubble="(P-1)(F+B)/V",
    memory="(2(P-1-r)+(V-1)G+1)/V micro-batches, G of a group",
    trainers=("Megatron-LM", "torch (ScheduleInterleaved1F1B)"),
)
