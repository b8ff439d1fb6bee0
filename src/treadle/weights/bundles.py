"""Bundles: what is never torn apart. Each fits in a bucket, and one rank at least has all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.weights.buffer_sizes import aligned
from treadle.weights.geometry import cut, split
from treadle.weights.match import MatchedBox
from treadle.weights.tensor_boxes import Box, Tensor

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a tensor that moves, and the ranks that have it."""

    tensor: Tensor
    part: MatchedBox
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Bundle:
    """Boxes of units, in the order of the units. `size_bytes` is what they take in a bucket."""

    pieces: tuple[tuple[Unit, Box], ...]
    ranks: Ranks
    size_bytes: int


def size_in_bucket(tensor: Tensor, box: Box) -> int:
    """Bytes up to where the next item may begin."""
    return aligned(tensor.itemsize * box.num_elements)


def make_bundles(units: Sequence[Unit], limit_bytes: int, even_bytes: int) -> tuple[list[Bundle], list[str]]:
    """Families as one bundle each where they can be, everything else alone, in the order of first units.

    What is larger than a bucket is cut; and what several ranks have, where it is larger than `even_bytes`, a rank's
    share of the whole, so that they can share it.
    """
    placed: list[tuple[int, list[Bundle]]] = []
    families: dict[str, list[tuple[int, Unit]]] = {}
    for place, unit in enumerate(units):
        if unit.tensor.family:
            families.setdefault(unit.tensor.family, []).append((place, unit))
        else:
            placed.append(
                (place, _pieces_of(unit, limit_bytes if len(unit.ranks) == 1 else min(limit_bytes, even_bytes)))
            )
    apart, torn = [], []
    for family, members in families.items():
        groups = _by_holders([unit for _, unit in members])
        names = {unit.tensor.name for _, unit in members}
        if any({unit.tensor.name for unit in group} != names for group, _ in groups):
            apart.append(family)
        made = [_family(group, ranks, limit_bytes, even_bytes) for group, ranks in groups]
        placed.append((members[0][0], [bundle for bundles, _ in made for bundle in bundles]))
        if not all(whole for _, whole in made):
            torn.append(family)
    notes = [*_note(apart, "no rank has matching pieces of all its tensors, so they travel apart")]
    notes += _note(torn, f"larger than a bucket of {limit_bytes} bytes, and its tensors have no rows in step to cut at")
    return [bundle for _, bundles in sorted(placed, key=lambda entry: entry[0]) for bundle in bundles], notes


def _note(families: Sequence[str], what: str) -> list[str]:
    more = f" (and {len(families) - 1} more)" if len(families) > 1 else ""
    return [f"family {families[0]}{more}: {what}"] if families else []


def _pieces_of(unit: Unit, limit_bytes: int) -> list[Bundle]:
    boxes = split(unit.part.box, unit.tensor.itemsize, limit_bytes)
    return [Bundle(((unit, box),), unit.ranks, size_in_bucket(unit.tensor, box)) for box in boxes]


def _by_holders(members: Sequence[Unit]) -> list[tuple[list[Unit], Ranks]]:
    """A family's units in groups that some rank has all of: all in one, or shard by shard."""
    common = set(members[0].ranks).intersection(*(unit.ranks for unit in members[1:]))
    if common:
        return [(list(members), tuple(sorted(common)))]
    by_ranks: dict[Ranks, list[Unit]] = {}
    for unit in members:
        by_ranks.setdefault(unit.ranks, []).append(unit)
    groups: list[tuple[list[Unit], Ranks]] = []
    for ranks, group in sorted(by_ranks.items(), key=lambda entry: len(entry[0])):
        held = set(ranks)
        names = {unit.tensor.name for unit in group}
        for i, (other, others) in enumerate(groups):
            # Only mates of another kind are sought: a shard does not wait for another shard of its tensor.
            if held & set(others) and names.isdisjoint(unit.tensor.name for unit in other):
                groups[i] = ([*other, *group], tuple(sorted(held & set(others))))
                break
        else:
            groups.append((group, ranks))
    return groups


def _family(group: Sequence[Unit], ranks: Ranks, limit_bytes: int, even_bytes: int) -> tuple[list[Bundle], bool]:
    """One bundle; or, as it is too large, rows in step, so that values stay with their scales. False: torn apart."""
    whole = [(unit, unit.part.box) for unit in group]
    size = _size(whole)
    if size > even_bytes and len(ranks) > 1:
        stepped = _in_step(whole, min(limit_bytes, even_bytes))
        if stepped:
            return [Bundle(tuple(piece), ranks, _size(piece)) for piece in stepped], True
    if size <= limit_bytes:
        return [Bundle(tuple(whole), ranks, size)], True
    stepped = _in_step(whole, limit_bytes)
    if stepped:
        return [Bundle(tuple(piece), ranks, _size(piece)) for piece in stepped], True
    torn = [bundle for unit in group for bundle in _pieces_of(Unit(unit.tensor, unit.part, ranks), limit_bytes)]
    return torn, False


def _in_step(whole: Sequence[tuple[Unit, Box]], limit_bytes: int) -> list[list[tuple[Unit, Box]]]:
    """All cut along rows into as many parts; nothing where their numbers of rows do not allow it.

    What has a single row goes with the first part.
    """
    rows = [box.shape[0] if box.shape else 1 for _, box in whole]
    first = [piece for piece, length in zip(whole, rows, strict=True) if length == 1]
    long = [piece for piece, length in zip(whole, rows, strict=True) if length > 1]
    steps = math.gcd(*(length for length in rows if length > 1)) if long else 1
    for parts in _counts(steps, _size(long), limit_bytes):
        cuts = [cut(box, 0, parts) for _, box in long]
        pieces = [[(unit, boxes[i]) for (unit, _), boxes in zip(long, cuts, strict=True)] for i in range(parts)]
        pieces[0] += first
        if max(map(_size, pieces)) <= limit_bytes:
            return pieces
    return []


def _counts(steps: int, size_bytes: int, limit_bytes: int) -> list[int]:
    """Numbers of parts to try, all of which divide the steps: from the fewest that may do."""
    fewest = max(2, size_bytes // limit_bytes)
    divisors = np.flatnonzero(steps % np.arange(1, min(steps, 4096) + 1) == 0) + 1
    return [int(parts) for parts in divisors if parts >= fewest]


def _size(pieces: Sequence[tuple[Unit, Box]]) -> int:
    return sum(size_in_bucket(unit.tensor, box) for unit, box in pieces)
