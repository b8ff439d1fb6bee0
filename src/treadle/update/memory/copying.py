"""Copies boxes in pieces that fit a core's cache, and makes digests on the way.

Digests are of the box's bytes in C order, whatever its strides. Elements are opaque: a tensor is viewed as unsigned
integers of its element size, so NumPy copies any dtype; it is faster at that than torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from treadle.weights.pieces import ITEMSIZE

Array: TypeAlias = npt.NDArray[Any]

PIECE_BYTES = 512 << 10
DIGEST_BYTES = 16

OPAQUE: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def boxed(raw: npt.NDArray[np.uint8], offset_bytes: int, shape: tuple[int, ...], dtype: str) -> Array:
    """A view of a box's elements, which lie in C order at an offset of a buffer."""
    size_bytes = math.prod(shape) * ITEMSIZE[dtype]
    if offset_bytes < 0 or offset_bytes + size_bytes > len(raw):
        raise ValueError(f"{size_bytes} bytes at {offset_bytes} are outside of a buffer of {len(raw)}")
    flat = raw[offset_bytes : offset_bytes + size_bytes]
    array: Array = flat.view(OPAQUE[ITEMSIZE[dtype]]).reshape(shape)
    return array


def opaque(tensor: torch.Tensor) -> Array:
    """A view of a host tensor as unsigned integers: the same memory."""
    plain = tensor.detach()
    if plain.dtype in (torch.bool, torch.uint8):
        plain = plain.view(torch.uint8)
    else:
        plain = plain.view(_TORCH[plain.element_size()])
    array: Array = plain.numpy()
    return array


def meaning(array: Array, dtype: str) -> torch.Tensor:
    """A view of opaque elements as a tensor of that dtype: the same memory."""
    return torch.from_numpy(array).view(getattr(torch, dtype))


def cut(array: Array, at: tuple[slice | int, ...]) -> Array:
    """A view of a part. An array even without dimensions, where NumPy's indexing returns a number."""
    index: Any = (*at, ...)
    part: Array = array[index]
    return part


def copy(target: Array, source: Array) -> None:
    """Copy all elements, without a digest."""
    np.copyto(target, source)


def copy_hashed(target: Array, source: Array) -> bytes:
    """Copy in pieces; the digest of the source."""
    hashed = xxhash.xxh3_128()
    for at in pieces(source.shape, source.itemsize):
        part, into = cut(source, at), cut(target, at)
        if part.flags.c_contiguous or not into.flags.c_contiguous:
            part = np.ascontiguousarray(part)
            np.copyto(into, part)
            hashed.update(_flat(part))
        else:
            np.copyto(into, part)
            hashed.update(_flat(into))
    return hashed.digest()


def digest(source: Array) -> bytes:
    """The digest that `copy_hashed` returns, without a copy."""
    hashed = xxhash.xxh3_128()
    for at in pieces(source.shape, source.itemsize):
        hashed.update(_flat(source[at]))
    return hashed.digest()


def _flat(part: Array) -> Any:
    """The bytes in C order; copied where they are not so in memory."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def pieces(shape: tuple[int, ...], itemsize: int, most_bytes: int = PIECE_BYTES) -> Iterator[tuple[slice | int, ...]]:
    """Indices that cut an array, in C order, into parts of at most so many bytes."""
    size = math.prod(shape) * itemsize
    if size <= most_bytes or not shape:
        if size:
            yield ()
        return
    row_bytes = size // shape[0]
    if row_bytes <= most_bytes:
        step = most_bytes // row_bytes
        for first in range(0, shape[0], step):
            yield (slice(first, min(first + step, shape[0])),)
        return
    for row in range(shape[0]):
        for rest in pieces(shape[1:], itemsize, most_bytes):
            yield (row, *rest)
