"""Parameters of which each rank of a group updates a part: a bucket of them is exchanged at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.dist.groups import Group
from treadle.runtime.model.gradient_bucket import GradientBucket, Owned

BucketNumber: TypeAlias = tuple[int, int]
"""A chunk, and the number of one of its buckets in the Program."""


class ParameterBucket:
    """Parameters of one type whose updated elements the ranks of a group exchange at once."""

    def __init__(self, rows: Sequence[Owned], group: Group) -> None:
        self._group = group
        self._rows = rows
        self._pointers, self._runs = list[int](), list[list[Tensor]]()
        self._size = max(sum(last - first for _, first, last in owned) for owned in rows)
        self._like = next(params[0].detach() for owned in rows for params, _, _ in owned)
        self._gathered: tuple[Tensor, dist.Work] | None = None

    def launch(self) -> None:
        """Launch the exchange."""
        self._follow()
        own = self._runs[self._group.group_rank]
        room = self._like.new_zeros(self._size - sum(map(len, own)))
        self._gathered = self._group.launch_gather_rows(torch.cat([*own, room]).view(torch.uint8))  # any type, by bits

    def _follow(self) -> None:
        """Look up the parameters' memory, which a new `.data` has moved."""
        pointers = [params[0].data_ptr() for owned in self._rows for params, _, _ in owned]
        if not self._runs or pointers != self._pointers:
            self._pointers = pointers
            self._runs = [[p[0].detach().view(-1)[first:last] for p, first, last in owned] for owned in self._rows]

    def arrive(self) -> None:
        """Wait for the exchange, and put the other ranks' elements into the parameters."""
        assert self._gathered is not None, "it is launched"
        (rows, work), self._gathered = self._gathered, None
        self._group.wait(work)
        into: list[Tensor] = []
        values: list[Tensor] = []
        for number, (row, runs) in enumerate(zip(rows.view(self._like.dtype), self._runs, strict=True)):
            if number != self._group.group_rank:
                sizes = [len(run) for run in runs]
                values += torch.split(row[: sum(sizes)], sizes)
                into += runs
        if into:
            torch._foreach_copy_(into, values)


def exchange_all(buckets: Iterable[ParameterBucket]) -> None:
    """Exchange buckets now, one after the other."""
    for bucket in buckets:
        bucket.launch()
        bucket.arrive()


@dataclass(frozen=True)
class DividedBuckets:
    """The buckets of a rank whose gradients are reduced in shards, and whose parameters are gathered.

    A bucket of the Program is a run of a stage's blocks. It has several buckets of memory, one after the other, where
    its parameters have several types or are held by different ranks, or are more than one has room for.
    """

    firsts: Mapping[int, tuple[int, ...]]
    """The first blocks of each chunk's buckets, from the last to 0."""

    gradients: dict[BucketNumber, list[GradientBucket]] = field(default_factory=dict)
    parameters: dict[BucketNumber, list[ParameterBucket]] = field(default_factory=dict)
    tied_gradients: dict[int, list[GradientBucket]] = field(default_factory=dict)
    """By the number of the tie's reduction."""

    tied_parameters: list[ParameterBucket] = field(default_factory=list)
