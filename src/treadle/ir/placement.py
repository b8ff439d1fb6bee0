"""Placement: which stage of the model each chunk of each rank holds.

loop            rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
v               rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
bidirectional   two pipes over the same ranks, one from each end; every stage lives on two ranks
0,2/1,3         any other table: ranks apart by '/', the stages of a rank's chunks by ','
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

_STAGE = "(0|[1-9][0-9]{0,5})"
_TABLE = re.compile(f"{_STAGE}(,{_STAGE})*(/{_STAGE}(,{_STAGE})*)*")

MOST_CHUNKS = 1000
"""Chunks on a rank; a larger number is taken for a typing error."""


@dataclass(frozen=True)
class Placement:
    """`stages[rank][chunk]` is a stage of the pipe `pipes[chunk]`.

    There is one pipe, except where micro-batches enter at both ends (DualPipe): then each direction
    is a pipe of its own, with its own micro-batches and its own copy of every stage.

    Raises:
        ValueError: a stage is missing or double, or ranks hold different numbers of chunks.

    Example:
        >>> Placement.loop(2, 2).stages
        ((0, 2), (1, 3))

    """

    name: str
    stages: tuple[tuple[int, ...], ...]
    pipes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.vpp > MOST_CHUNKS:
            raise ValueError(f"a rank holds at most {MOST_CHUNKS} chunks, got {self.vpp}")
        if not self.stages:
            raise ValueError("a placement has 1 or more ranks, got 0")
        widths = {len(row) for row in self.stages}
        if widths != {len(self.pipes)}:
            raise ValueError(
                f"every rank of a placement holds as many stages as the others, got {sorted(widths)}; "
                "give each rank the same number of chunks"
            )
        for pipe in range(self.num_pipes):
            held = sorted(s for row in self.stages for c, s in enumerate(row) if self.pipes[c] == pipe)
            if held != list(range(self.num_stages)):
                raise ValueError(
                    f"a placement holds each stage from 0 to {self.num_stages - 1} once, got {held}; "
                    "number the stages along the pipe without gaps or repeats"
                )

    @classmethod
    def loop(cls, pp: int, vpp: int = 1) -> Placement:
        """Chunk c of rank r is stage c*P + r: each pass over the ranks starts again at rank 0."""
        return cls("loop", tuple(tuple(c * pp + r for c in range(vpp)) for r in range(pp)), (0,) * vpp)

    @classmethod
    def v(cls, pp: int, vpp: int = 2) -> Placement:
        """Chunk 0 runs down the ranks, chunk 1 back up, and so on: the turn needs no message."""

        def stage(rank: int, chunk: int) -> int:
            return chunk * pp + (rank if chunk % 2 == 0 else pp - 1 - rank)

        return cls("v", tuple(tuple(stage(r, c) for c in range(vpp)) for r in range(pp)), (0,) * vpp)

    @classmethod
    def bidirectional(cls, pp: int, vpp: int = 2) -> Placement:
        """Chunk 0 is the pipe that enters at rank 0, chunk 1 the one that enters at the last rank."""
        if vpp != 2:
            raise ValueError(f"a bidirectional placement has two chunks, one a direction, got {vpp}")
        return cls("bidirectional", tuple((r, pp - 1 - r) for r in range(pp)), (0, 1))

    @classmethod
    def table(cls, stages: tuple[tuple[int, ...], ...]) -> Placement:
        """Any table of one pipe, under its well-known name where it has one."""
        pp, vpp = len(stages), len(stages[0]) if stages else 0
        text = "/".join(",".join(map(str, row)) for row in stages)
        custom = cls(text, stages, (0,) * vpp)
        known = (p for p in (cls.loop(pp, vpp), cls.v(pp, vpp)) if p.stages == stages)
        return next(known, custom)

    @classmethod
    def parse(cls, text: str, pp: int, vpp: int) -> Placement:
        """Read what `name` writes, for this many ranks and chunks."""
        if vpp > MOST_CHUNKS:
            raise ValueError(f"a rank holds at most {MOST_CHUNKS} chunks, got {vpp}")
        if text in NAMED:
            return NAMED[text](pp, vpp)
        if _TABLE.fullmatch(text) is None:
            raise ValueError(
                f"placement {text!r} is not known; use {', '.join(NAMED)}, "
                "or a table of stages such as 0,2/1,3 (ranks apart by '/', chunks by ',')"
            )
        placement = cls.table(tuple(tuple(map(int, row.split(","))) for row in text.split("/")))
        if (placement.pp, placement.vpp) != (pp, vpp):
            raise ValueError(
                f"placement {text} is for {placement.pp} ranks of {placement.vpp} chunks, "
                f"the rows have {pp} ranks of {vpp}"
            )
        return placement

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """Number of chunks on each rank."""
        return len(self.pipes)

    @property
    def num_pipes(self) -> int:
        """1, or 2 where micro-batches enter at both ends."""
        return max(self.pipes) + 1

    @property
    def num_stages(self) -> int:
        """Stages along one pipe."""
        return self.pp * self.vpp // self.num_pipes

    @cached_property
    def _holder(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {
            (self.pipes[chunk], stage): (rank, chunk)
            for rank, row in enumerate(self.stages)
            for chunk, stage in enumerate(row)
        }

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that chunk `chunk` of rank `rank` holds."""
        return self.stages[rank][chunk]

    def holder(self, stage: int, pipe: int = 0) -> tuple[int, int]:
        """The (rank, chunk) that holds a stage of a pipe."""
        return self._holder[pipe, stage]

    def ranks_of(self, stages: Collection[int]) -> tuple[int, ...]:
        """The ranks that hold any of these stages."""
        return tuple(rank for rank, row in enumerate(self.stages) if not set(stages).isdisjoint(row))

    def neighbour(self, rank: int, chunk: int, step: int) -> tuple[int, int] | None:
        """The (rank, chunk) `step` stages further along the same pipe, or None past its ends."""
        return self._holder.get((self.pipes[chunk], self.stages[rank][chunk] + step))


NAMED = {"loop": Placement.loop, "v": Placement.v, "bidirectional": Placement.bidirectional}
