"""Digests that a device makes of its own bytes: weighted sums of integers, the same on any device and on the host.

Bytes in C order are 32-bit words x_i, with zeros after the last. Each is multiplied by an odd 64-bit number of its own,
w[i % COLUMNS] * v[i // COLUMNS % ROWS] * GROWTH ** chunks after it, and products are added modulo 2 ** 64, for two sets
of numbers. One word that differs always changes both sums. Two that differ, or are exchanged, leave both as they are
with a chance below 2 ** -64. These are reductions of integers, so that the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from treadle.update.memory.copying import SIGNED, on_host, pieces

COLUMNS = 1 << 14
ROWS = 1 << 8
CHUNK_BYTES = 4 * COLUMNS * ROWS
"""Bytes that are summed at once. Products of a chunk take two times its memory."""

_GROWTH = 0x5851F42D4C957F2D
_SPREAD = 0x1E3779B97F4A7C15
_MIX = 0x56E8FEB86659FD93
_LOW = 0xFFFFFFFF


class Sums:
    """Makes digests on the device of a tensor."""

    def __init__(self, like: torch.Tensor) -> None:
        self._columns = torch.stack([_weights(like, COLUMNS, salt) for salt in (0, COLUMNS)])
        self._rows = _weights(like, ROWS, 2 * COLUMNS)

    def of(self, boxes: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the digest of boxes, one after the other, as two integers on their device; nothing waits for it."""
        total = self._rows.new_zeros(2)
        size_bytes = 0
        for chunk in _chunks(boxes):
            size_bytes += chunk.numel()
            total = total * _GROWTH + self._sum(chunk)
        return total * _GROWTH + size_bytes

    def table(self, digests: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return digests as the bytes of a table."""
        made = [self.of(boxes) for boxes in digests]
        return torch.stack(made).view(-1).view(torch.uint8) if made else self._rows.new_empty(0, dtype=torch.uint8)

    def _sum(self, chunk: torch.Tensor) -> torch.Tensor:
        """The two sums of up to CHUNK_BYTES bytes."""
        words = _words(chunk)
        whole = len(words) // COLUMNS
        parts = [self._of_rows(words[: whole * COLUMNS].view(whole, COLUMNS))] if whole else []
        if len(words) > whole * COLUMNS:
            parts.append(self._of_rows(words[whole * COLUMNS :].view(1, -1)))
        rows = torch.cat(parts)
        return (rows * self._rows[: len(rows), None]).sum(0)

    def _of_rows(self, words: torch.Tensor) -> torch.Tensor:
        weights = self._columns[:, : words.shape[1]]
        if not on_host(words):
            return torch.stack([(words * weights[at]).sum(1) for at in range(2)], 1)
        rows, sums = words.numpy(), np.empty((len(words), 2), np.int64)
        for row in range(len(rows)):  # products stay in the core's cache: 20 times as fast
            sums[row] = np.einsum("c,kc->k", rows[row].astype(np.int64), weights.numpy())
        return torch.from_numpy(sums)


def _weights(like: torch.Tensor, num: int, salt: int) -> torch.Tensor:
    """Odd numbers of 64 bits, by their places from `salt` on."""
    mixed = (like.new_ones(num, dtype=torch.int64).cumsum(0) + salt) * _SPREAD
    for _ in range(2):
        mixed = (mixed ^ (torch.bitwise_right_shift(mixed, 32) & _LOW)) * _MIX
    return (mixed ^ (torch.bitwise_right_shift(mixed, 32) & _LOW)) | 1


def _words(chunk: torch.Tensor) -> torch.Tensor:
    if len(chunk) % 4:
        chunk = torch.cat([chunk, chunk.new_zeros(-len(chunk) % 4)])
    elif chunk.storage_offset() % 4:
        chunk = chunk.clone()
    return chunk.view(torch.int32)


def _chunks(boxes: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of boxes in C order, as many at a time as are summed at once."""
    held: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for part in _flat(boxes):
        rest = part
        while len(rest) >= room:
            yield torch.cat([*held, rest[:room]]) if held else rest[:room]
            held, rest, room = [], rest[room:], CHUNK_BYTES
        if len(rest):
            held.append(rest)
            room -= len(rest)
    if held:
        yield torch.cat(held) if len(held) > 1 else held[0]


def _flat(boxes: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for box in boxes:
        integers = box.detach().view(SIGNED[box.element_size()])
        if integers.is_contiguous():
            yield integers.view(-1).view(torch.uint8)
            continue
        for at in pieces(tuple(box.shape), box.element_size(), CHUNK_BYTES):
            yield integers[at].contiguous().view(-1).view(torch.uint8)
