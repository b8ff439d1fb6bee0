"""Copies boxes between tensors, on the host and on devices, and makes digests on the way.

Digests are of the box's bytes in C order, whatever its strides. Elements are opaque: they are copied as integers of
their size, so any dtype arrives bit by bit. On the host NumPy copies, in pieces that fit a core's cache; it is faster
at that than torch. Between devices torch copies on the current stream, and between a device and the host through pinned
memory, in pieces: a copy from or to other memory holds the host until it is done (torch 2.13,
ATen/native/cuda/Copy.cu, `copy_kernel_cuda`), and torch's pinned allocator keeps a piece until its copies have ended
(ATen/core/CachingHostAllocator.h). `digest` brings a device's bytes to the host in pieces; those of buffers are summed
on the device (`device_sums.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from treadle.dist.streams import Download, streams_of
from treadle.weights.tensor_boxes import ITEMSIZE

Array: TypeAlias = npt.NDArray[Any]

PIECE_BYTES = 512 << 10
DEVICE_PIECE_BYTES = 16 << 20
"""Bytes that are compared on a device, or copied from or to it, at once: enough that it is not all latency."""
DIGEST_BYTES = 16
_POLL_S = 0.00005

_UNSIGNED: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
SIGNED: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""torch copies and compares signed integers on every device; of the unsigned ones NumPy is the better user."""


def boxed(raw: torch.Tensor, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A view of a box's elements, which lie in C order at an offset of a buffer's bytes."""
    size_bytes = math.prod(shape) * ITEMSIZE[dtype]
    if offset_bytes < 0 or offset_bytes + size_bytes > len(raw):
        raise ValueError(f"{size_bytes} bytes at {offset_bytes} are outside of a buffer of {len(raw)}")
    return raw[offset_bytes : offset_bytes + size_bytes].view(getattr(torch, dtype)).view(shape)


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether the host can address a tensor's bytes."""
    return tensor.device.type == "cpu"


def opaque(tensor: torch.Tensor) -> Array:
    """A view of a host tensor as unsigned integers: the same memory."""
    array: Array = tensor.detach().view(_UNSIGNED[tensor.element_size()]).numpy()
    return array


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all elements bit by bit, without a digest. Where both are on a device, it is done when the stream is."""
    if on_host(target) and on_host(source):
        np.copyto(opaque(target), opaque(source))
    elif on_host(source):
        _upload(target, source)
    elif on_host(target):
        into = opaque(target)
        for at, part in _downloaded(source):
            np.copyto(cut(into, at), part)
    else:
        _integers(target).copy_(_integers(source))


def brought(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device."""
    if device.type == source.device.type:
        return source
    made = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy(made, source)
    return made


def _upload(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a device, whose current stream does so later; the source may change at once."""
    streams, values, into = streams_of(target.device), opaque(source), _integers(target)
    assert streams is not None
    for at in pieces(values.shape, values.itemsize, DEVICE_PIECE_BYTES):
        part = cut(values, at)
        room = streams.pinned(part.nbytes).view(into.dtype).view(part.shape)
        np.copyto(opaque(room), part)
        into[at].copy_(room, non_blocking=True)


def _downloaded(source: torch.Tensor) -> Iterator[tuple[tuple[slice | int, ...], Array]]:
    """Yield the parts of a device's tensor on the host; the next one is on its way meanwhile."""
    ahead: deque[tuple[tuple[slice | int, ...], Download]] = deque()
    for at in pieces(tuple(source.shape), source.element_size(), DEVICE_PIECE_BYTES):
        ahead.append((at, Download(_integers(source)[at])))
        if len(ahead) > 1:
            done, part = ahead.popleft()
            yield done, opaque(part.tensor())
    for done, part in ahead:
        yield done, opaque(part.tensor())


def copy_hashed(target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copy all elements; the digest of the source."""
    if on_host(target) and on_host(source):
        return _copy_hashed(opaque(target), opaque(source))
    copy(target, source)
    return digest(target if on_host(target) else source)


def digest(source: torch.Tensor) -> bytes:
    """Return the digest that `copy_hashed` returns, without a copy."""
    hashed = xxhash.xxh3_128()
    if on_host(source):
        array = opaque(source)
        for at in pieces(array.shape, array.itemsize):
            hashed.update(_flat(cut(array, at)))
    else:
        for _, part in _downloaded(source):
            hashed.update(_flat(part))
    return hashed.digest()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two boxes of one shape are the same bit by bit. Two on a device are compared there."""
    if on_host(one) and on_host(other):
        mine, theirs = opaque(one), opaque(other)
        return all(np.array_equal(cut(mine, at), cut(theirs, at)) for at in pieces(mine.shape, mine.itemsize))
    for at in pieces(tuple(one.shape), one.element_size(), DEVICE_PIECE_BYTES):
        a, b = one[at], other[at]
        if a.device != b.device:
            a, b = Download(_integers(a)).tensor(), Download(_integers(b)).tensor()
        if not torch.equal(_integers(a), _integers(b)):
            return False
    return True


def finish_copies(*devices: torch.device) -> None:
    """Wait until devices have done what this thread's current streams were told so far. A host has always."""
    for device in dict.fromkeys(devices):
        streams = streams_of(device)
        if streams is not None:
            event = streams.event(device)
            while not event.query():
                time.sleep(_POLL_S)


def _copy_hashed(target: Array, source: Array) -> bytes:
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


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(SIGNED[tensor.element_size()])


def cut(array: Array, at: tuple[slice | int, ...]) -> Array:
    """A view of a part. An array even without dimensions, where NumPy's indexing returns a number."""
    index: Any = (*at, ...)
    part: Array = array[index]
    return part


def _flat(part: Array) -> Any:
    """Return the bytes in C order; copied where they are not so in memory."""
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
