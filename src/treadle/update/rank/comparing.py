"""Compares ranks that have the same pieces: each rank compares what it receives with its own copy.

Ranks that say they have version 7 may differ in it: one loaded another checkpoint, or missed a step. Each piece comes
from one of them, so workers would get a mixture, every byte of which matches its source. Every bucket reaches every
rank, so a rank compares a bucket with its own weights while the next one is broadcast. A difference fails the update
before the vote, and workers go back.

    sample   of every piece one block of 4 KiB in sixteen, and at least one; the next update takes the blocks after them
    all      every byte
    off      nothing

Where buckets go to one device each, no rank sees another's. Each then makes a digest of what it shares with others, of
the same blocks as they, and sends it with its vote: the coordinator compares.

Names that an engine has tied are compared too, always and in all bytes: the engine takes one of the tensors, and a
source that has another under the second name would lose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash

from treadle.update.memory.copying import boxed, digest
from treadle.update.memory.copying import same as same_bits
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.control import Sample
from treadle.update.rank.source import Source, WeightSource
from treadle.update.update_options import CompareSources
from treadle.weights.tensor_boxes import Box, Piece
from treadle.weights.update_plan import Item, UpdatePlan

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
            for box in _overlaps(self._boxes.get(item.piece.tensor, ()), item.piece.box):
                common = Piece(item.piece.tensor, box)
                if same(_part(self.plan, buffer, item, box), self.source.local(common), self.every, self.turn):
                    self.equal.add(bucket.source)
                else:
                    self.different.setdefault(bucket.source, []).append(common)

    @cached_property
    def _boxes(self) -> dict[str, list[Box]]:
        return _boxes_of(self.source)

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


@dataclass
class TieComparison:
    """One rank's comparison of names that engines have tied: `tied` has each with the name that engines take."""

    plan: UpdatePlan
    source: WeightSource
    tied: Sequence[tuple[str, str]]
    different: list[tuple[Piece, str]] = field(default_factory=list)
    """Pieces of tied names that are not the same as the tensor that engines take."""

    def compare_own(self) -> None:
        """Compare what this rank has under both names."""
        for name, taken in self._moved:
            for box in self._boxes[name]:
                for common in _overlaps(self._boxes.get(taken, ()), box):
                    if not self._are_same(Piece(name, common), Piece(taken, common)):
                        self.different.append((Piece(name, common), taken))

    def _are_same(self, one: Piece, other: Piece) -> bool:
        """True where two pieces of this rank have the same elements; by digests, as a source may make one at a time."""
        local = self.source.local
        if isinstance(self.source, Source) and _one_memory(local(one), local(other)):
            return True
        return digest(local(one)) == digest(local(other))

    def look(self, buffer: Buffer, number: int) -> None:
        """Compare a bucket that has arrived with what only this rank has under the tied name."""
        for item in self.plan.buckets[number].items:
            for name, box in self._alone.get(item.piece.tensor, ()):
                for common in _overlaps([box], item.piece.box):
                    own = self.source.local(Piece(name, common))
                    if not same_bits(_part(self.plan, buffer, item, common), own):
                        self.different.append((Piece(name, common), item.piece.tensor))

    @cached_property
    def _boxes(self) -> dict[str, list[Box]]:
        return _boxes_of(self.source)

    @cached_property
    def _moved(self) -> list[tuple[str, str]]:
        """The names that this rank has, of tensors that move."""
        return [(name, taken) for name, taken in self.tied if name in self._boxes and taken in self.plan.tensors]

    @property
    def needs_arrivals(self) -> bool:
        """True where this rank compares elements that arrive: it lacks the tensor itself."""
        return bool(self._alone)

    @cached_property
    def _alone(self) -> dict[str, list[tuple[str, Box]]]:
        """By the tensor that moves: the boxes of tied names that this rank does not have of the tensor itself."""
        alone: dict[str, list[tuple[str, Box]]] = {}
        for name, taken in self._moved:
            for box in self._boxes[name]:
                if not any(own.meet(box) == box for own in self._boxes.get(taken, ())):
                    alone.setdefault(taken, []).append((name, box))
        return alone

    def refusal(self, version: int) -> str | None:
        """Return the error text; None where no difference was seen."""
        if not self.different:
            return None
        piece, taken = self.different[0]
        return (
            f"engines have tied {piece.tensor!r} to {taken!r} and take the latter for both, and in the source the two "
            f"differ, in {piece.box}: version {version} would be served without its {piece.tensor!r}; use engines that "
            "do not tie them (tie_word_embeddings=False), or a source in which they are the same"
        )


def shared_samples(
    plan: UpdatePlan, source: WeightSource, rank: int, compare: CompareSources, turn: int, over: Callable[[], bool]
) -> tuple[Sample, ...]:
    """Return digests of what this rank shares with others; of the blocks of this `turn`, the same on all ranks.

    Ends early, with any result, once the attempt is `over`.
    """
    if compare == "off":
        return ()
    every, made = EVERY if compare == "sample" else 1, []
    for number, shared in enumerate(plan.shared):
        if rank in shared.ranks:
            hashed = xxhash.xxh3_128()
            for piece in shared.pieces:
                if over():
                    return ()
                for part in _sampled(source.local(piece), every, turn):
                    hashed.update(digest(part))
            names = list(dict.fromkeys(piece.tensor for piece in shared.pieces))
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            made.append(Sample(number, hashed.hexdigest(), ", ".join(names[:_MOST_NAMED]) + more))
    return tuple(made)


def _sampled(tensor: torch.Tensor, every: int, turn: int) -> Iterator[torch.Tensor]:
    """Yield all of a tensor, or the blocks of this turn. Which these are depends on its shape alone."""
    if every == 1 or not tensor.dim() or not tensor.numel():
        yield tensor
        return
    axis, rows = _blocks(tuple(tensor.shape), tensor.element_size(), every)
    tensor = tensor.movedim(axis, 0)
    whole = len(tensor) // rows
    yield tensor[whole * rows :]
    for block in range(turn % min(every, whole) if whole else 0, whole, every):
        yield tensor[block * rows : (block + 1) * rows]


def _boxes_of(source: WeightSource) -> dict[str, list[Box]]:
    """Return the boxes that a rank has of each tensor."""
    boxes: dict[str, list[Box]] = {}
    for piece in source.has.pieces:
        boxes.setdefault(piece.tensor, []).append(piece.box)
    return boxes


def _overlaps(boxes: Sequence[Box], other: Box) -> Iterator[Box]:
    """What each of the boxes has in common with another one."""
    for box in boxes:
        common = box.meet(other)
        if common is not None:
            yield common


def _part(plan: UpdatePlan, buffer: Buffer, item: Item, box: Box) -> torch.Tensor:
    """A box of an item in a buffer."""
    tensor, whole = plan.tensors[item.piece.tensor], item.piece.box
    return boxed(buffer.tensor, item.offset_bytes, whole.shape, tensor.dtype)[box.slices(whole)]


def _one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are the same elements in memory."""
    return one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def comparison(
    plan: UpdatePlan, source: WeightSource | None, rank: int, compare: CompareSources, turn: int
) -> SourceComparison | None:
    """A comparison, or None where it is off or this rank has no source."""
    if compare == "off" or source is None:
        return None
    return SourceComparison(plan, source, rank, EVERY if compare == "sample" else 1, turn)


def same(one: torch.Tensor, other: torch.Tensor, every: int, turn: int) -> bool:
    """Return whether two tensors are the same bit by bit: all of it, or the blocks of this turn."""
    if one.is_contiguous() and other.is_contiguous():
        one, other = one.view(-1), other.view(-1)
    if every == 1:
        return same_bits(one, other)
    axis, rows = _blocks(tuple(one.shape), one.element_size(), every)
    one, other = one.movedim(axis, 0), other.movedim(axis, 0)
    whole = len(one) // rows
    if not same_bits(one[whole * rows :], other[whole * rows :]):  # the rest, less than a block
        return False
    if not whole:
        return True
    chosen = slice(turn % min(every, whole), None, every)
    blocks = (tensor[: whole * rows].view(whole, rows, *tensor.shape[1:])[chosen] for tensor in (one, other))
    return same_bits(*blocks)


def _blocks(shape: tuple[int, ...], itemsize: int, every: int) -> tuple[int, int]:
    """Return the dimension that is cut into blocks, and how many of its indices a block has."""
    row_bytes = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(row_bytes) if size <= BLOCK_BYTES or shape[axis] >= every)
    return axis, max(1, BLOCK_BYTES // row_bytes[axis])


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"update rank {ranks[0]}"
    return f"update ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
