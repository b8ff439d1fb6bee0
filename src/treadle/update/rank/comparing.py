"""Compares ranks that have the same pieces: each rank compares what it receives with its own copy.

Ranks that say they have version 7 may differ in it: one loaded another checkpoint, or missed a step. Each piece comes
from one of them, so workers would get a mixture, every byte of which matches its source. Every bucket reaches every
rank, so a rank compares a bucket with its own weights while the next one is broadcast. A difference fails the update
before the vote, and workers go back.

    sample   of every piece one block of 4 KiB in sixteen, and at least one; the next update takes the blocks after them
    all      every byte
    off      nothing
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from treadle.update.memory.copying import Array, boxed, cut, opaque, pieces
from treadle.update.memory.host import Buffer, Raw
from treadle.update.options import CompareSources
from treadle.update.rank.source import WeightSource
from treadle.weights.pieces import Box, Piece
from treadle.weights.plan import Item, UpdatePlan

BLOCK_BYTES = 4 << 10
EVERY = 16
_MOST_NAMED = 4


@dataclass
class SourceComparison:
    """One rank's comparison in one update. `turn` chooses the blocks of a sample: `EVERY` turns cover all of them."""

    plan: UpdatePlan
    source: WeightSource
    rank: int
    every: int
    turn: int
    equal: set[int] = field(default_factory=set)
    """Ranks whose pieces were the same as this rank's."""
    different: dict[int, list[Piece]] = field(default_factory=dict)
    """Pieces that differ from this rank's, by the rank that sent them."""

    def look(self, buffer: Buffer, number: int) -> None:
        """Compare a bucket that has arrived with this rank's own weights."""
        bucket = self.plan.buckets[number]
        for item in bucket.items:
            for common in self._overlaps(item.piece):
                came = cut(self._item(buffer, item), common.box.slices(item.piece.box))
                if same(came, opaque(self.source.local(common).cpu()), self.every, self.turn):
                    self.equal.add(bucket.source)
                else:
                    self.different.setdefault(bucket.source, []).append(common)

    def _overlaps(self, piece: Piece) -> Iterator[Piece]:
        """The parts of a piece that this rank has."""
        for box in self._boxes.get(piece.tensor, ()):
            common = box.meet(piece.box)
            if common is not None:
                yield Piece(piece.tensor, common)

    @cached_property
    def _boxes(self) -> dict[str, list[Box]]:
        boxes: dict[str, list[Box]] = {}
        for piece in self.source.has.pieces:
            boxes.setdefault(piece.tensor, []).append(piece.box)
        return boxes

    def _item(self, buffer: Buffer, item: Item) -> Array:
        dtype, box = self.plan.tensors[item.piece.tensor].dtype, item.piece.box
        if buffer.tensor.device.type == "cpu":
            return boxed(buffer.raw, item.offset_bytes, box.shape, dtype)
        size_bytes = self.plan.tensors[item.piece.tensor].itemsize * box.num_elements
        raw: Raw = buffer.tensor[item.offset_bytes : item.offset_bytes + size_bytes].cpu().numpy()
        return boxed(raw, 0, box.shape, dtype)

    def refusal(self, version: int) -> tuple[str, str] | None:
        """Who differs, and the error text; None where no difference was seen."""
        if not self.different:
            return None
        found = [piece for some in self.different.values() for piece in some]
        named = ", ".join(f"{piece.tensor} {piece.box}" for piece in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more pieces" if len(found) > _MOST_NAMED else ""
        others = sorted(self.equal - self.different.keys())
        agree = f"; what {_ranks(others)} sent is the same on update rank {self.rank}" if others else ""
        text = (
            f"they hold different weights, all as version {version}: {named}{more} of {_ranks(sorted(self.different))} "
            f"differ from update rank {self.rank}'s{agree}; give all ranks the same weights (do they load one "
            "checkpoint, and take every step together?), or say of each piece on one rank only that it is there; "
            "compare_sources='all' finds every difference"
        )
        return _ranks(sorted({*self.different, self.rank})), text


def comparison(
    plan: UpdatePlan, source: WeightSource | None, rank: int, compare: CompareSources, turn: int
) -> SourceComparison | None:
    """A comparison, or None where it is off or this rank has no source."""
    if compare == "off" or source is None:
        return None
    return SourceComparison(plan, source, rank, EVERY if compare == "sample" else 1, turn)


def same(one: Array, other: Array, every: int, turn: int) -> bool:
    """True where two arrays are the same bit by bit: all of it, or the blocks of this turn."""
    if one.flags.c_contiguous and other.flags.c_contiguous:
        one, other = one.reshape(-1), other.reshape(-1)
    if every == 1:
        return all(np.array_equal(cut(one, at), cut(other, at)) for at in pieces(one.shape, one.itemsize))
    axis, rows = _blocks(one.shape, one.itemsize, every)
    one, other = (np.moveaxis(array, axis, 0) for array in (one, other))
    whole = len(one) // rows
    if not np.array_equal(one[whole * rows :], other[whole * rows :]):  # the rest, less than a block
        return False
    if not whole:
        return True
    split = (whole, rows, *one.shape[1:])
    chosen = slice(turn % min(every, whole), None, every)
    return np.array_equal(one[: whole * rows].reshape(split)[chosen], other[: whole * rows].reshape(split)[chosen])


def _blocks(shape: tuple[int, ...], itemsize: int, every: int) -> tuple[int, int]:
    """The dimension that is cut into blocks, and how many of its indices a block has."""
    row_bytes = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(row_bytes) if size <= BLOCK_BYTES or shape[axis] >= every)
    return axis, max(1, BLOCK_BYTES // row_bytes[axis])


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"update rank {ranks[0]}"
    return f"update ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
