"""The parts of a tensor that move: boxes that ranks have, intersected with boxes that workers want.

The boxes alone decide it, and the tensors of a large model have few different sets of them, so each set is worked out
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.weights.geometry import disjoint, joined, meeting, remove
from treadle.weights.tensor_boxes import Box


@dataclass(frozen=True, slots=True)
class MatchedBox:
    """A box that moves as one, which of the boxes that ranks have contain it, and what of it each wanted box takes."""

    box: Box
    had_in: tuple[int, ...]
    takes: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Parts apart from each other; `absent` is the first wanted box that is not wholly there, and what is missing."""

    parts: tuple[MatchedBox, ...]
    absent: tuple[Box, Box] | None


class Matcher:
    """Matches by sets of boxes, each worked out once. Boxes go by number: a million of them are hashed too slowly."""

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        self._by_value: dict[Box, int] = {}
        self._by_identity: dict[int, int] = {}
        self._seen: list[Box] = []  # kept, so that no other box gets the identity of one of them
        self._matches: dict[tuple[tuple[int, ...], tuple[int, ...]], Match] = {}

    def number(self, box: Box) -> int:
        """The same for equal boxes."""
        number = self._by_identity.get(id(box))
        if number is None:
            number = self._by_value.setdefault(box, len(self._boxes))
            if number == len(self._boxes):
                self._boxes.append(box)
            self._seen.append(box)
            self._by_identity[id(box)] = number
        return number

    def match(self, have: tuple[int, ...], want: tuple[int, ...]) -> Match:
        """Numbers of boxes; those in `have` are different from each other, and so are those in `want`."""
        found = self._matches.get((have, want))
        if found is None:
            boxes = self._boxes
            found = self._matches[have, want] = _match([boxes[i] for i in have], [boxes[i] for i in want])
        return found


def _match(have: Sequence[Box], want: Sequence[Box]) -> Match:
    parts = [part for box, had_in in _fragments(have) for part in _wanted(box, had_in, want)]
    boxes = [part.box for part in parts]
    covered = [0] * len(want)
    for part in parts:
        for index, box in part.takes:
            covered[index] += box.num_elements
    for index, box in enumerate(want):
        if covered[index] < box.num_elements:
            return Match(tuple(parts), (box, remove(box, boxes)[0]))
    return Match(tuple(parts), None)


def _fragments(have: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes apart from each other, and which of those that ranks have contain each.

    Small ones first: where one rank has all and others have shards, all of them can be sources of the shards.
    """
    order = sorted(range(len(have)), key=lambda i: have[i].num_elements)
    found = disjoint([have[i] for i in order])
    holders: list[list[int]] = [[] for _ in found]
    for i, j in zip(*meeting(found, have), strict=True):
        if found[i].meet(have[j]) == found[i]:
            holders[i].append(j)
    return [(box, tuple(held)) for box, held in zip(found, holders, strict=True)]


def _wanted(box: Box, had_in: tuple[int, ...], want: Sequence[Box]) -> list[MatchedBox]:
    """The box as it is if all of it is wanted by somebody, else the boxes of it that are."""
    _, which = meeting([box], want)
    asked = [(index, common) for index in which if (common := box.meet(want[index])) is not None]
    if not asked:
        return []
    apart = disjoint([common for _, common in asked])
    if sum(common.num_elements for common in apart) == box.num_elements:
        return [MatchedBox(box, had_in, tuple(asked))]
    parts = []
    for moved in joined(apart):
        takes = ((index, part) for index, common in asked if (part := moved.meet(common)) is not None)
        parts.append(MatchedBox(moved, had_in, tuple(takes)))
    return parts
