"""How tensors are divided among the ranks that hold them, in buckets: pure numbers, the same on every rank.

AdamW works on elements, so a bucket's elements are cut into equal runs, wherever a tensor ends. Muon needs whole
matrices, so each is given to the rank that has the fewest elements so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Run:
    """Elements `first` to below `last` of tensor number `tensor`."""

    tensor: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


Shares: TypeAlias = tuple[tuple[Run, ...], ...]
"""The runs of each rank, of one bucket."""


def divide_elements(sizes: Sequence[int], num_ranks: int, bucket: int) -> list[Shares]:
    """Cut tensors of these sizes into equal runs of elements; the last rank of a bucket may have fewer.

    Buckets are whole tensors, at least `bucket` elements each but for the last.

    Example:
        >>> [[list(map(str, runs)) for runs in shares] for shares in divide_elements([3, 2], 2, 100)]
        [[['Run(tensor=0, first=0, last=3)'], ['Run(tensor=1, first=0, last=2)']]]

    """
    return [_cut(sizes, tensors, num_ranks) for tensors in _buckets(sizes, range(len(sizes)), bucket)]


def divide_whole(sizes: Sequence[int], num_ranks: int, bucket: int, *, loads: list[int] | None = None) -> list[Shares]:
    """Give each tensor to one rank, the largest first, each to the rank with the fewest elements so far.

    `loads` are the elements that ranks have already, and have then.
    """
    largest_first = sorted(range(len(sizes)), key=lambda tensor: (-sizes[tensor], tensor))
    loads, divided = [0] * num_ranks if loads is None else loads, list[Shares]()
    for tensors in _buckets(sizes, largest_first, bucket):
        runs: list[list[Run]] = [[] for _ in range(num_ranks)]
        for tensor in tensors:
            rank = loads.index(min(loads))
            loads[rank] += sizes[tensor]
            runs[rank].append(Run(tensor, 0, sizes[tensor]))
        divided.append(tuple(map(tuple, runs)))
    return divided


def cut_blocks(sizes: Mapping[int, int], bucket: int) -> tuple[int, ...]:
    """Return the first blocks of a stage's buckets, from the last block to 0; all but the last have at least `bucket`.

    `sizes` are those of the blocks that have any.

    Example:
        >>> cut_blocks({0: 10, 1: 6, 2: 5, 3: 5}, 10)
        (2, 0)

    """
    firsts, size = list[int](), 0
    for block in sorted(sizes, reverse=True):
        size += sizes[block]
        if size >= bucket and block > 0:
            firsts.append(block)
            size = 0
    return (*firsts, 0)


def _buckets(sizes: Sequence[int], order: Sequence[int], bucket: int) -> Iterator[list[int]]:
    """Yield the tensors of each bucket; empty tensors are in none."""
    tensors, size = list[int](), 0
    for tensor in order:
        if sizes[tensor] > 0:
            tensors.append(tensor)
            size += sizes[tensor]
        if size >= bucket:
            yield tensors
            tensors, size = [], 0
    if tensors:
        yield tensors


def _cut(sizes: Sequence[int], tensors: Sequence[int], num_ranks: int) -> Shares:
    """Cut the elements of a bucket's tensors, one after the other, into a run of the same length for each rank."""
    total = sum(sizes[tensor] for tensor in tensors)
    share = -(-total // num_ranks)
    runs: list[list[Run]] = [[] for _ in range(num_ranks)]
    begin = 0
    for tensor in tensors:
        end = begin + sizes[tensor]
        for rank in range(begin // share, -(-end // share)):
            first, last = max(begin, rank * share), min(end, (rank + 1) * share)
            runs[rank].append(Run(tensor, first - begin, last - begin))
        begin = end
    return tuple(map(tuple, runs))
