"""Changed elements of a memory as a stream of bytes, and their way back into a memory.

Two memories are compared in runs of elements of one size, and these in blocks of up to 64 Ki elements. Bits are
compared: a NaN's payload and the sign of a zero count. Of a block that differs the stream has what is smallest:

    positions   for each changed element its place in the block, 16 bits; then the changed elements
    bitmap      a bit for each element of the block; then the changed elements
    plain       all elements

    stream:     the number of blocks | a header for each | what each has, padded to 8 bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treadle.update.memory.copying import SIGNED, Array, brought, copy

BLOCK = 1 << 16
"""Most elements of a block: a place in it has 16 bits."""
_ALIGN = 8
_POSITIONS, _BITMAP, _PLAIN = range(3)
_HEADER = np.dtype([("offset", "u8"), ("num", "u4"), ("count", "u4"), ("itemsize", "u1"), ("form", "u1")], align=True)

Places = npt.NDArray[np.int64]


class ElementRun(NamedTuple):
    """Elements of one size that follow each other in a memory."""

    offset_bytes: int
    num_elements: int
    itemsize: int


class _Block(NamedTuple):
    """A block of a stream: where its elements go, and where the stream has them. `places` None: all of the block."""

    offset_bytes: int
    num: int
    itemsize: int
    places: Places | None
    values: slice


def room_for(runs: Sequence[ElementRun]) -> int:
    """Return the most bytes that a stream of these runs takes beside their elements."""
    return _ALIGN + sum(-(-run.num_elements // BLOCK) * (_HEADER.itemsize + _ALIGN) for run in runs)


def encode(old: torch.Tensor, new: torch.Tensor, runs: Sequence[ElementRun]) -> torch.Tensor:
    """Return the stream of the elements of `new` that differ from those of `old`; both are bytes on the host."""
    headers: list[tuple[int, int, int, int, int]] = []
    parts: list[Array] = []
    for offset, num, itemsize in runs:
        was, now = (raw.numpy()[offset : offset + num * itemsize].view(f"u{itemsize}") for raw in (old, new))
        for first in range(0, num, BLOCK):
            block = now[first : first + BLOCK]
            places = np.flatnonzero(was[first : first + BLOCK] != block)
            if len(places):
                form, made = _smallest(places, block)
                headers.append((offset + first * itemsize, len(block), len(places), itemsize, form))
                parts += made
    begin = [_bytes(np.array([len(headers)], np.uint64)), _bytes(np.array(headers, _HEADER))]
    return torch.from_numpy(np.concatenate([padded for part in (*begin, *parts) for padded in _padded(part)]))


def _smallest(places: Places, block: Array) -> tuple[int, list[Array]]:
    num, count, itemsize = len(block), len(places), block.itemsize
    bitmap_bytes = -(-num // 8)
    if _up(num * itemsize) <= _up(count * itemsize) + _up(min(2 * count, bitmap_bytes)):
        return _PLAIN, [_bytes(block)]
    if 2 * count <= bitmap_bytes:
        return _POSITIONS, [_bytes(places.astype(np.uint16)), _bytes(block[places])]
    bits = np.zeros(num, np.bool_)
    bits[places] = True
    return _BITMAP, [np.packbits(bits), _bytes(block[places])]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _padded(part: Array) -> Iterator[Array]:
    yield part
    yield np.zeros(-len(part) % _ALIGN, np.uint8)


def patch(raw: torch.Tensor, stream: torch.Tensor, *, swap: bool = False) -> list[tuple[int, int]]:
    """Write a stream's elements into a memory, on any device; the ranges of bytes in which something was written.

    With `swap` the stream, which is on the host, gets the elements that were there: it is the way back then. Raises
    ValueError for a stream that is none, or that writes outside of the memory.
    """
    touched = []
    for block in list(_blocks(stream, len(raw))):
        end = block.offset_bytes + block.num * block.itemsize
        held = raw[block.offset_bytes : end].view(SIGNED[block.itemsize])
        values = stream[block.values].view(SIGNED[block.itemsize])
        places = brought(torch.from_numpy(block.places), raw.device) if block.places is not None else slice(None)
        before = held[places].clone() if swap else None
        held[places] = brought(values, raw.device)
        if before is not None:
            copy(values, before)
        touched.append((block.offset_bytes, end))
    return touched


def _blocks(stream: torch.Tensor, size_bytes: int) -> Iterator[_Block]:
    """The blocks of a stream, each checked against a memory of that size."""
    raw = stream.numpy()
    num_blocks = int(raw[:_ALIGN].view(np.uint64)[0]) if len(raw) >= _ALIGN else -1
    at = _ALIGN + num_blocks * _HEADER.itemsize
    if not 0 <= num_blocks <= len(raw) or at > len(raw):
        raise ValueError(f"a stream of {len(raw)} bytes does not have {num_blocks} blocks")
    for header in raw[_ALIGN:at].view(_HEADER).tolist():
        offset, num, count, itemsize, form = header
        fits = itemsize in SIGNED and offset % itemsize == 0 and offset + num * itemsize <= size_bytes
        if not fits or not 0 < count <= num <= BLOCK or form not in (_POSITIONS, _BITMAP, _PLAIN):
            raise ValueError(f"{num} elements of {itemsize} bytes at byte {offset} are no block of {size_bytes} bytes")
        index_bytes = {_POSITIONS: 2 * count, _BITMAP: -(-num // 8), _PLAIN: 0}[form]
        begin = at + _up(index_bytes)
        end = begin + itemsize * (num if form == _PLAIN else count)
        if end > len(raw):
            raise ValueError(f"a stream of {len(raw)} bytes ends before byte {end} of a block")
        places = _places(raw[at : at + index_bytes], form, num)
        if places is not None and (len(places) != count or int(places.max()) >= num):
            raise ValueError(f"{count} of {num} elements are changed, the stream has other places")
        yield _Block(offset, num, itemsize, places, slice(begin, end))
        at = _up(end)


def _places(index: Array, form: int, num: int) -> Places | None:
    if form == _PLAIN:
        return None
    if form == _BITMAP:
        return np.flatnonzero(np.unpackbits(index, count=num))
    return index.view(np.uint16).astype(np.int64)


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
