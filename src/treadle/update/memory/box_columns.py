"""Boxes of tensors in one memory, as columns: which box lies where. Made once for a plan, used in all its updates.

A tensor then costs about a microsecond a copy, whatever its size: where both sides are on the host and in C order, its
bytes are moved by address, and no view is made of either side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from treadle.update.memory.copying import PIECE_BYTES, Array, boxed, copy, copy_hashed, digest, on_host, opaque
from treadle.weights.tensor_boxes import ITEMSIZE, Box


class PlacedBox(NamedTuple):
    """A box of a tensor. It is a part of `origin`, whose elements are in C order from an offset of a memory."""

    name: str
    box: Box
    dtype: str
    offset_bytes: int
    origin: Box


class BoxColumns:
    """Boxes by number. `start` has the byte at which a box begins, -1 where its elements do not follow each other."""

    def __init__(self, placed: Iterable[PlacedBox]) -> None:
        self.placed = list(placed)
        self.names = [one.name for one in self.placed]
        self.start: list[int] = []
        self.size_bytes: list[int] = []
        self.end_bytes = 0
        for one in self.placed:
            itemsize, first = ITEMSIZE[one.dtype], first_element(one.box, one.origin)
            self.start.append(one.offset_bytes + itemsize * first if first >= 0 else -1)
            self.size_bytes.append(itemsize * one.box.num_elements)
            self.end_bytes = max(self.end_bytes, one.offset_bytes + itemsize * one.origin.num_elements)
        self._origins: Mapping[str, Box] | None = None
        self._places: list[tuple[int, int]] = []
        self._fault: str | None = None

    def __len__(self) -> int:
        return len(self.placed)

    def check_room(self, raw: torch.Tensor) -> None:
        """Raise ValueError where a memory is too small for the boxes."""
        if self.end_bytes > len(raw):
            raise ValueError(f"boxes up to byte {self.end_bytes} are outside of a memory of {len(raw)}")

    def view(self, raw: torch.Tensor, at: int) -> torch.Tensor:
        """The elements of a box, in the bytes of a memory."""
        one = self.placed[at]
        whole = boxed(raw, one.offset_bytes, one.origin.shape, one.dtype)
        return whole if one.box == one.origin else whole[one.box.slices(one.origin)]

    def misplaced(self, origins: Mapping[str, Box]) -> str | None:
        """Which box is not within those that are held, given by tensor; None where all are."""
        self._place(origins)
        return self._fault

    def copy_to(
        self,
        raw: torch.Tensor,
        held: Mapping[str, torch.Tensor],
        origins: Mapping[str, Box],
        hashed: Callable[[int], bool] = lambda at: False,
    ) -> dict[int, bytes]:
        """Copy all boxes out of a memory, to their places in tensors that hold `origins`; the digests of those hashed.

        Raises ValueError where a tensor is not what it is said to be.
        """
        found: dict[int, bytes] = {}
        bytes_of: Array | None = None
        for at, target, address in self._pairs(raw, held, origins):
            if not address:
                part, staged = self._part(target, at, origins), self.view(raw, at)
                if hashed(at):
                    found[at] = copy_hashed(part, staged)
                else:
                    copy(part, staged)
            elif hashed(at):
                bytes_of = opaque(raw) if bytes_of is None else bytes_of
                found[at] = _move_hashed(address, bytes_of, self.start[at], self.size_bytes[at])
            else:
                ctypes.memmove(address, raw.data_ptr() + self.start[at], self.size_bytes[at])
        return found

    def copy_from(self, raw: torch.Tensor, held: Mapping[str, torch.Tensor], origins: Mapping[str, Box]) -> None:
        """Copy all boxes into a memory, from their places in tensors that hold `origins`."""
        for at, source, address in self._pairs(raw, held, origins):
            if address:
                ctypes.memmove(raw.data_ptr() + self.start[at], address, self.size_bytes[at])
            else:
                copy(self.view(raw, at), self._part(source, at, origins))

    def move_to(self, raw: torch.Tensor, others: BoxColumns, first: int, into: torch.Tensor) -> set[int]:
        """Move boxes to those of another memory from number `first` on, where both sides allow it; which were moved."""
        if not (on_host(raw) and on_host(into)):
            return set()
        self.check_room(raw)
        others.check_room(into)
        moved, here, there = set(), raw.data_ptr(), into.data_ptr()
        for at, (start, size_bytes) in enumerate(zip(self.start, self.size_bytes, strict=True)):
            place = others.start[first + at]
            if start >= 0 and place >= 0 and others.size_bytes[first + at] == size_bytes:
                ctypes.memmove(there + place, here + start, size_bytes)
                moved.add(at)
        return moved

    def _pairs(
        self, raw: torch.Tensor, held: Mapping[str, torch.Tensor], origins: Mapping[str, Box]
    ) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Each box, its tensor, and the address of its place there; 0 where it is not moved by address."""
        self._place(origins)
        if self._fault is not None:
            raise ValueError(self._fault)
        self.check_room(raw)
        here = on_host(raw)
        for at, (name, start, (place, whole_bytes)) in enumerate(
            zip(self.names, self.start, self._places, strict=True)
        ):
            tensor = held[name]
            plain = here and start >= 0 and place >= 0 and tensor.is_cpu and tensor.is_contiguous()
            if plain and tensor.nbytes == whole_bytes:
                yield at, tensor, tensor.data_ptr() + place
            else:
                yield at, tensor, 0

    def _part(self, tensor: torch.Tensor, at: int, origins: Mapping[str, Box]) -> torch.Tensor:
        one = self.placed[at]
        origin = origins[one.name]
        if tuple(tensor.shape) != origin.shape or tensor.element_size() != ITEMSIZE[one.dtype]:
            raise ValueError(
                f"{one.name} is held as {tuple(tensor.shape)} of {tensor.element_size()} bytes an element, and comes "
                f"as {origin.shape} of {ITEMSIZE[one.dtype]}"
            )
        return tensor if one.box == origin else tensor[one.box.slices(origin)]

    def _place(self, origins: Mapping[str, Box]) -> None:
        """Find each box's place in the tensors that hold `origins`: once, as long as they are these."""
        if self._origins is origins:
            return
        self._origins, self._places, self._fault = origins, [], None
        for one in self.placed:
            origin = origins.get(one.name)
            if origin is None or (one.box != origin and one.box.meet(origin) != one.box and one.box.num_elements):
                where = f"{one.box} is not within {origin}, which is held" if origin is not None else "is not held"
                self._fault = f"{one.name} {where}"
                return
            itemsize, first = ITEMSIZE[one.dtype], first_element(one.box, origin)
            self._places.append((itemsize * first, itemsize * origin.num_elements))


class SharedDigest:
    """The digest of one or several boxes of a memory: of their bytes in C order, one box after the other."""

    def __init__(self, columns: BoxColumns, boxes: Sequence[int]) -> None:
        self.columns, self.boxes = columns, sorted(boxes, key=lambda at: _order(columns.placed[at]))
        self._runs: list[tuple[int, int]] | None = _runs(columns, self.boxes)

    def of(self, raw: torch.Tensor) -> bytes:
        """The digest of what is in a host's memory now; `Sums` makes those of a device."""
        if self._runs is None:
            if len(self.boxes) == 1:
                return digest(self.columns.view(raw, self.boxes[0]))
            return _digest_of([self.columns.view(raw, at) for at in self.boxes])
        low, high = (self._runs[0][0], self._runs[-1][1]) if self._runs else (0, 0)
        part = opaque(raw[low:high]).data
        hashed = xxhash.xxh3_128()
        for start, end in self._runs:
            hashed.update(part[start - low : end - low])
        return hashed.digest()


def _order(one: PlacedBox) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return one.offset_bytes, one.box.start, one.box.stop


def _runs(columns: BoxColumns, boxes: Sequence[int]) -> list[tuple[int, int]] | None:
    """The bytes of boxes, as few runs from low to high as they make; None where a box is none."""
    runs: list[tuple[int, int]] = []
    for at in boxes:
        start, end = columns.start[at], columns.start[at] + columns.size_bytes[at]
        if start < 0 or (runs and start < runs[-1][1]):
            return None
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        elif end > start:
            runs.append((start, end))
    return runs


def _digest_of(views: Iterable[torch.Tensor]) -> bytes:
    hashed = xxhash.xxh3_128()
    for view in views:
        hashed.update(opaque(view.contiguous()).tobytes())
    return hashed.digest()


def _move_hashed(address: int, memory: Array, start: int, size_bytes: int) -> bytes:
    """Move bytes by address, piece by piece, and hash each while it is in the core's cache."""
    hashed = xxhash.xxh3_128()
    base, view = memory.ctypes.data, memory.data
    for at in range(start, start + size_bytes, PIECE_BYTES):
        size = min(PIECE_BYTES, start + size_bytes - at)
        ctypes.memmove(address + at - start, base + at, size)
        hashed.update(view[at : at + size])
    return hashed.digest()


def first_element(box: Box, origin: Box) -> int:
    """The index of a box's first element in `origin`, -1 where its elements do not follow each other there."""
    if box == origin:
        return 0
    first, cut = 0, False
    for low, high, start, stop in zip(box.start, box.stop, origin.start, origin.stop, strict=True):
        if cut and (low, high) != (start, stop):
            return -1
        cut = cut or high - low != 1
        first = first * (stop - start) + low - start
    return first
