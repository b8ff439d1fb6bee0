"""The plan of a weight update: buckets in the order in which they move, and what each worker takes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from treadle.ir.notebook_forms import ShownInNotebooks
from treadle.weights.buffer_sizes import Memory, aligned, choose_buffers
from treadle.weights.bundles import Bundle, Ranks, Unit, make_bundles, size_in_bucket
from treadle.weights.collecting import uncollected
from treadle.weights.geometry import disjoint
from treadle.weights.match import Matcher
from treadle.weights.matched_steps import Hops, matched_steps
from treadle.weights.missing import missing_tensors, who_wants
from treadle.weights.sources import choose_sources, fill_buckets, spread_of
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """The elements of a box, in C order, from an offset of the bucket."""

    piece: Piece
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """The pieces that one source copies to its device and sends at once.

    They go to all devices, or to the first of `dests`, and from each of these to the next.
    """

    source: int
    round: int
    items: tuple[Item, ...]
    size_bytes: int
    dests: tuple[int, ...] = ()

    @property
    def times(self) -> int:
        """How often it is sent: a broadcast counts once."""
        return max(1, len(self.dests))

    @cached_property
    def all_of_it(self) -> tuple[Take, ...]:
        """All items, as what one worker takes."""
        return tuple(Take(at, item.piece.box) for at, item in enumerate(self.items))


@dataclass(frozen=True, slots=True)
class Take:
    """A part of an item of the bucket; the box is absolute in the tensor."""

    item: int
    box: Box


@dataclass(frozen=True)
class SharedPieces:
    """Pieces that these ranks all have."""

    ranks: Ranks
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class UpdatePlan(ShownInNotebooks):
    """Bucket i is broadcast i-th and goes into IPC buffer i % num_ipc; worker w takes `takes[w][i]` from it.

    `num_h2d` 0: a source copies straight into the IPC buffer that it will broadcast from. A targeted plan
    (`num_targets` takers) has no `takes`: the `dests` of a bucket take all of it. Where ranks do not see the elements
    of all buckets, `shared` are the pieces that several ranks have, to be compared by themselves.
    """

    tensors: dict[str, Tensor]
    buckets: tuple[Bucket, ...]
    takes: tuple[tuple[tuple[Take, ...], ...], ...]
    bucket_bytes: int
    num_h2d: int
    num_ipc: int
    notes: tuple[str, ...] = ()
    num_targets: int = 0
    shared: tuple[SharedPieces, ...] = ()

    @property
    def is_targeted(self) -> bool:
        """True where each bucket goes to one device, False where all are broadcast."""
        return self.num_targets > 0

    def taken(self, worker: int, bucket: int) -> tuple[Take, ...]:
        """Return what a worker takes of a bucket."""
        if not self.is_targeted:
            return self.takes[worker][bucket]
        moved = self.buckets[bucket]
        return moved.all_of_it if worker in moved.dests else ()

    @cached_property
    def hops(self) -> Hops:
        """Who sends each bucket of a targeted plan to whom, and in which step."""
        return matched_steps([(bucket.source, *bucket.dests) for bucket in self.buckets], self.num_ipc)

    def digest(self) -> str:
        """The same in any process that holds the same plan; notes are for people and not part of it."""
        hashed = hashlib.blake2b(digest_size=16)
        hashed.update(f"{self.bucket_bytes} {self.num_h2d} {self.num_ipc}\n".encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            hashed.update(f"{name!r} {tensor.shape} {tensor.dtype} {tensor.family!r}\n".encode())
        for bucket in self.buckets:
            hashed.update(f"{bucket.source} {bucket.round} {bucket.dests} {bucket.size_bytes}\n".encode())
            for item in bucket.items:
                hashed.update(f"{item.piece.tensor!r} {item.piece.box} {item.offset_bytes}\n".encode())
        texts: dict[int, str] = {}  # by identity, as workers share tuples, and tuples takes
        rows: dict[int, bytes] = {}
        for row in self.takes:
            if id(row) not in rows:
                for take in (take for bucket in row for take in bucket if id(take) not in texts):
                    texts[id(take)] = f"{take.item}{take.box}"
                lines = (" ".join([texts[id(take)] for take in bucket]) for bucket in row)
                rows[id(row)] = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
            hashed.update(rows[id(row)])
        return hashed.hexdigest()


def plan_update(
    have: Holding, want: Holding, memory: Memory, only: Collection[str] | None = None, *, shared: bool = False
) -> UpdatePlan:
    """Move what workers want, each byte to each of them once; with `only`, of those tensors alone.

    A wanted byte that no rank has is a ValueError, and so is a name in `only` that no worker wants. What several ranks
    have comes from whoever has least to send; with `shared` the plan lists it.
    """
    with uncollected():
        return _plan(have, want, memory, only, shared=shared)


def _plan(have: Holding, want: Holding, memory: Memory, only: Collection[str] | None, *, shared: bool) -> UpdatePlan:
    tensors, matcher = moved(have, want, only), Matcher()
    wanted, wanting = by_tensor(want, tensors, matcher)
    units = units_of(have, want, tensors, wanted, matcher)
    num_ranks = len(have.pieces)
    total_bytes = sum(size_in_bucket(unit.tensor, unit.part.box) for unit in units)
    spread = spread_of(units, min(memory.target_bytes, memory.usable_bytes))
    rough = choose_buffers(memory, total_bytes, spread)
    even_bytes = max(memory.least_bytes, aligned(total_bytes // max(1, num_ranks)))
    bundles, notes = make_bundles(units, rough.limit_bytes, even_bytes)
    source, largest_bytes = choose_sources(bundles, num_ranks, memory.least_bytes)
    buffers = choose_buffers(memory, largest_bytes, spread)
    filled = fill_buckets(bundles, source, buffers.limit_bytes, buffers.window_bytes)
    buckets = tuple(_bucket(*entry) for entry in filled)
    num_rounds = max((bucket.round for bucket in buckets), default=-1) + 1
    return UpdatePlan(
        tensors,
        buckets,
        _takes(filled, wanted, wanting),
        max((bucket.size_bytes for bucket in buckets), default=0),
        min(buffers.num_h2d, num_rounds),
        min(buffers.num_ipc, max(1, len(buckets))),
        (*(buffers.notes if num_rounds > 1 else buffers.notes[1:]), *notes),
        shared=shared_of(units) if shared else (),
    )


def shared_of(units: Sequence[Unit]) -> tuple[SharedPieces, ...]:
    """Pieces that several ranks have, by these ranks."""
    by_ranks: dict[Ranks, list[Piece]] = {}
    for unit in units:
        if len(unit.ranks) > 1:
            by_ranks.setdefault(unit.ranks, []).append(Piece(unit.tensor.name, unit.part.box))
    return tuple(SharedPieces(ranks, tuple(pieces)) for ranks, pieces in sorted(by_ranks.items()))


def moved(have: Holding, want: Holding, only: Collection[str] | None) -> dict[str, Tensor]:
    """The tensors to move, in the order in which they are wanted, as the source describes them."""
    chosen = set(want.tensors if only is None else only)
    unknown = sorted(chosen - want.tensors.keys() - have.tensors.keys())
    if unknown:
        raise ValueError(f"`only` names {unknown[0]!r}, which is neither had nor wanted; leave it out")
    unwanted = sorted(chosen - want.tensors.keys())
    if unwanted:
        raise ValueError(
            f"`only` names {unwanted[0]!r}, which no worker wants; name the tensor it is tied to, or leave it out"
        )
    missing = [name for name in want.tensors if name in chosen and name not in have.tensors]
    if missing:
        raise ValueError(missing_tensors(missing, have, want))
    tensors = {}
    for name, wanted in want.tensors.items():
        if name not in chosen:
            continue
        had = have.tensors[name]
        if (had.shape, had.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{name}: worker expects {wanted.dtype} {wanted.shape}, source has {had.dtype} {had.shape}; "
                "an update moves bytes as they are, so convert it at the source"
            )
        tensors[name] = had if had.family else wanted
    return tensors


_Held: TypeAlias = dict[str, dict[int, list[int]]]
"""For each tensor its boxes, by number, and for each box the classes that hold it."""


def by_tensor(holding: Holding, tensors: Collection[str], matcher: Matcher) -> tuple[_Held, list[list[int]]]:
    """Who holds which boxes, and the ranks of each class: those that share their pieces."""
    classes: dict[int, list[int]] = {}
    for rank, pieces in enumerate(holding.pieces):
        classes.setdefault(id(pieces), []).append(rank)
    held: _Held = {name: {} for name in tensors}
    for number, ranks in enumerate(classes.values()):
        pieces = holding.pieces[ranks[0]]
        if len({piece.tensor for piece in pieces}) < len(pieces):
            pieces = _apart(pieces)
        for piece in pieces:
            boxes = held.get(piece.tensor)
            if boxes is not None:
                boxes.setdefault(matcher.number(piece.box), []).append(number)
    return held, list(classes.values())


def _apart(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The same bytes, none of them twice."""
    boxes: dict[str, list[Box]] = {}
    for piece in pieces:
        boxes.setdefault(piece.tensor, []).append(piece.box)
    return tuple(
        Piece(name, box) for name, some in boxes.items() for box in (disjoint(some) if len(some) > 1 else some)
    )


def units_of(have: Holding, want: Holding, tensors: dict[str, Tensor], wanted: _Held, matcher: Matcher) -> list[Unit]:
    """Return what moves, in parts apart from each other; a wanted byte that no rank has is a ValueError."""
    had, having = by_tensor(have, tensors, matcher)
    units = []
    ranks_of: dict[tuple[int, ...], Ranks] = {}
    for name, tensor in tensors.items():
        if not wanted[name]:
            continue
        boxes = had[name]
        match = matcher.match(tuple(boxes), tuple(wanted[name]))
        if match.absent is not None:
            asked, missing = match.absent
            raise ValueError(
                f"{name} {asked} is wanted, but no rank has {missing} of it; {who_wants(want, name, asked)} it; add a "
                "rank that has it"
            )
        holders = list(boxes.values())
        for part in match.parts:
            classes = tuple(sorted({number for box in part.had_in for number in holders[box]}))
            ranks = ranks_of.get(classes)
            if ranks is None:
                ranks = ranks_of[classes] = tuple(sorted(rank for number in classes for rank in having[number]))
            units.append(Unit(tensor, part, ranks))
    return units


def _bucket(turn: int, source: int, bundles: list[Bundle]) -> Bucket:
    items, offset = [], 0
    for bundle in bundles:
        for unit, box in bundle.pieces:
            items.append(Item(Piece(unit.tensor.name, box), offset))
            offset += size_in_bucket(unit.tensor, box)
    return Bucket(source, turn, tuple(items), offset)


def _takes(
    filled: list[tuple[int, int, list[Bundle]]], wanted: _Held, wanting: list[list[int]]
) -> tuple[tuple[tuple[Take, ...], ...], ...]:
    """For each worker and bucket; workers that want the same share one tuple, and equal takes are one object."""
    known: dict[tuple[int, int], Take] = {}  # by item and identity of the box, which the take keeps
    taken: list[list[tuple[Take, ...]]] = [[()] * len(filled) for _ in wanting]
    for bucket, (_, _, bundles) in enumerate(filled):
        here: dict[int, list[Take]] = {}
        for item, (unit, box) in enumerate(piece for bundle in bundles for piece in bundle.pieces):
            classes = list(wanted[unit.tensor.name].values())
            for index, part in unit.part.takes:
                common = part if box is unit.part.box else part.meet(box)
                if common is None:
                    continue
                take = known.get((item, id(common)))
                if take is None:
                    take = known[item, id(common)] = Take(item, common)
                for number in classes[index]:
                    here.setdefault(number, []).append(take)
        for number, takes in here.items():
            taken[number][bucket] = tuple(takes)
    whole = [tuple(row) for row in taken]
    number_of = {worker: number for number, workers in enumerate(wanting) for worker in workers}
    return tuple(whole[number_of[worker]] for worker in range(len(number_of)))
