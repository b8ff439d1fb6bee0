"""Boxes of tensors that have reached a worker: staged in a buffer, with the digests that their source made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from treadle.dist.streams import Download
from treadle.update.memory.box_columns import BoxColumns, SharedDigest
from treadle.update.memory.copying import DIGEST_BYTES, copy, copy_hashed, digest, on_host
from treadle.update.memory.device_sums import Sums
from treadle.weights.tensor_boxes import Box, Piece


@dataclass
class Arrival:
    """A box of tensor `name`: `tensor` has its elements, of the box's shape, on the host or on the buffers' device.

    `tensor` is valid until `load` returns: an engine that needs it longer copies it. On the host `copy_into` makes the
    digest on the way. Where an adapter reads `tensor` by other means, the worker makes it after `load`, which costs
    another pass over the bytes. A device makes the digests of a bucket together, after `load`.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    expected: bytes | None = None
    found: bytes | None = field(default=None, repr=False)

    def copy_into(self, target: torch.Tensor) -> None:
        """Copy bit by bit to a tensor of the box's shape, on any device; the first copy makes an expected digest."""
        own = self.tensor
        if target.shape != own.shape or target.element_size() != own.element_size():
            raise ValueError(
                f"{self.name} {self.box} has shape {tuple(own.shape)} and {own.element_size()} bytes an element, "
                f"the target {tuple(target.shape)} and {target.element_size()}"
            )
        if self.expected is None or self.found is not None or not on_host(own):
            copy(target, own)
        else:
            self.found = copy_hashed(target, own)

    @property
    def wrong(self) -> bool:
        """True where the bytes differ from the source's."""
        if self.expected is None:
            return False
        if self.found is None:
            self.found = digest(self.tensor)
        return self.found != self.expected


@dataclass(frozen=True)
class StagedColumns:
    """The boxes that a worker takes of a bucket, and their digests by their number in the bucket's table."""

    boxes: BoxColumns
    alone: Mapping[int, int]
    """By box: the digest that only this box is in."""
    shared: Mapping[int, SharedDigest]
    """Digests of several boxes."""


class StagedArrivals(Sequence[Arrival]):
    """The arrivals of a bucket, each made when it is asked for. `copy_into` takes all of them at once."""

    def __init__(self, columns: StagedColumns, raw: torch.Tensor, expected: Mapping[int, bytes]) -> None:
        self.columns, self.raw, self.expected = columns, raw, expected
        self._made: dict[int, Arrival] = {}
        self._found: dict[int, bytes] = {}
        columns.boxes.check_room(raw)

    def __len__(self) -> int:
        return len(self.columns.boxes)

    @overload
    def __getitem__(self, at: int) -> Arrival: ...

    @overload
    def __getitem__(self, at: slice) -> list[Arrival]: ...

    def __getitem__(self, at: int | slice) -> Arrival | list[Arrival]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        made = self._made.get(at)
        if made is None:
            boxes = self.columns.boxes
            one, check = boxes.placed[at], self.columns.alone.get(at)
            expected = self.expected.get(check) if check is not None else None
            made = self._made[at] = Arrival(one.name, one.box, boxes.view(self.raw, at), expected)
        return made

    def copy_into(self, held: Mapping[str, torch.Tensor], origins: Mapping[str, Box]) -> str | None:
        """Copy all to their places in tensors, of which each is the box that `origins` gives; None, or what is wrong.

        Bit by bit, as `Arrival.copy_into` does, and with the digests of boxes that have one of their own.
        """
        boxes = self.columns.boxes
        fault = boxes.misplaced(origins)
        if fault is not None:
            return fault
        alone = self.columns.alone if self.expected and on_host(self.raw) else {}
        self._found |= boxes.copy_to(self.raw, held, origins, lambda at: at in alone and at not in self._found)
        return None

    def move_to(self, boxes: BoxColumns, first: int, raw: torch.Tensor) -> set[int]:
        """Move what lies in C order on the host to boxes from number `first` on, without digests; which were moved."""
        return self.columns.boxes.move_to(self.raw, boxes, first, raw)

    def digests(self) -> dict[int, bytes]:
        """Return all digests of what is in the buffer, by their number in its table."""
        if not on_host(self.raw):
            return self._device_digests()
        alone = {check: digest(self[at].tensor) for at, check in self.columns.alone.items()}
        return alone | {check: shared.of(self.raw) for check, shared in self.columns.shared.items()}

    def _device_digests(self) -> dict[int, bytes]:
        boxes = self.columns.boxes
        groups = {check: [at] for at, check in self.columns.alone.items()}
        groups |= {check: shared.boxes for check, shared in self.columns.shared.items()}
        views = ([boxes.view(self.raw, at) for at in ats] for ats in groups.values())
        table = Download(Sums(self.raw).table(views)).tensor().numpy().tobytes()
        starts = range(0, len(table), DIGEST_BYTES)
        return {check: table[at : at + DIGEST_BYTES] for check, at in zip(groups, starts, strict=True)}

    def wrong(self) -> str | None:
        """Which bytes differ from their source's; None where none do. Makes the digests that are not made yet."""
        if not self.expected:
            return None
        found_there = self.digests() if not on_host(self.raw) else {}
        for at, check in self.columns.alone.items():
            found = found_there.get(check, self._found.get(at))
            if self[at].wrong if found is None else found != self.expected[check]:
                return f"{self.columns.boxes.names[at]} {self.columns.boxes.placed[at].box}"
        for check, shared in self.columns.shared.items():
            if (found_there[check] if found_there else shared.of(self.raw)) != self.expected[check]:
                names = sorted({self.columns.boxes.names[at] for at in shared.boxes})
                return f"{names[0]} and {len(names) - 1} more tensors up to {names[-1]}"
        return None


def copy_arrivals(
    arrivals: Sequence[Arrival], held: Mapping[str, torch.Tensor], origins: Mapping[str, Box]
) -> str | None:
    """Copy arrivals into tensors, of which each is the box that `origins` gives; None, or what is wrong."""
    if isinstance(arrivals, StagedArrivals):
        return arrivals.copy_into(held, origins)
    for arrival in arrivals:
        if arrival.name not in held:
            return f"{arrival.name} is not held"
        arrival.copy_into(held[arrival.name][arrival.box.slices(origins[arrival.name])])
    return None


class Leaving(Sequence[tuple[Piece, torch.Tensor]]):
    """Pieces that an engine exports, each with the tensor that it goes into. `copy_from` takes all of them at once."""

    def __init__(self, boxes: BoxColumns, raw: torch.Tensor) -> None:
        self.boxes, self.raw = boxes, raw

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, at: int) -> tuple[Piece, torch.Tensor]: ...

    @overload
    def __getitem__(self, at: slice) -> list[tuple[Piece, torch.Tensor]]: ...

    def __getitem__(self, at: int | slice) -> tuple[Piece, torch.Tensor] | list[tuple[Piece, torch.Tensor]]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        one = self.boxes.placed[at]
        return Piece(one.name, one.box), self.boxes.view(self.raw, at)

    def copy_from(self, held: Mapping[str, torch.Tensor], origins: Mapping[str, Box]) -> str | None:
        """Copy all from their places in tensors, of which each is the box that `origins` gives; None, or what is wrong.

        Bit by bit.
        """
        fault = self.boxes.misplaced(origins)
        if fault is None:
            self.boxes.copy_from(self.raw, held, origins)
        return fault


class Assembly:
    """Puts pieces together from their parts, on the device of these, for engines that need whole ones."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, Box], tuple[Arrival, int]] = {}

    def add(self, part: Arrival, wanted: Box) -> Arrival | None:
        """Add a part; the wanted piece once it is complete, else None. A part that is all of it passes through."""
        if part.box == wanted:
            return part
        key = part.name, wanted
        if key not in self._parts:
            whole = Arrival(part.name, wanted, part.tensor.new_empty(wanted.shape))
            self._parts[key] = whole, wanted.num_elements
        whole, missing = self._parts[key]
        part.copy_into(whole.tensor[part.box.slices(wanted)])
        missing -= part.box.num_elements
        self._parts[key] = whole, missing
        if missing:
            return None
        return self._parts.pop(key)[0]

    @property
    def missing(self) -> list[str]:
        """Names of tensors with incomplete pieces."""
        return sorted({name for name, _ in self._parts})
