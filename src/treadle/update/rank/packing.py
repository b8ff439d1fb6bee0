"""Packs a source's pieces into a bucket, with the digests of the boxes that workers will take."""

from __future__ import annotations

import itertools

import torch

from treadle.update.memory.copying import DIGEST_BYTES, boxed, copy, copy_hashed, cut, digest, opaque
from treadle.update.memory.host import Buffer
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import WeightSource
from treadle.weights.pieces import Box
from treadle.weights.plan import Item, Take

_MOST_APART = 64


class Packer:
    """Fills buffers with buckets of a source; `checked`: with digests."""

    def __init__(self, shares: Shares, source: WeightSource, *, checked: bool) -> None:
        self.shares, self.source, self.checked = shares, source, checked

    def fill(self, buffer: Buffer, number: int) -> None:
        """Put bucket `number` and its table of digests into the buffer."""
        if buffer.tensor.device.type != "cpu":
            self._fill_device(buffer.tensor, number)
            return
        bucket, table = self.shares.plan.buckets[number], self.shares.tables[number]
        for at, item in enumerate(bucket.items):
            self._pack(buffer, item, table.of_item.get(at, ()), table.offset_bytes)

    def _pack(self, buffer: Buffer, item: Item, takes: tuple[tuple[int, Take], ...], table_bytes: int) -> None:
        piece, raw = item.piece, buffer.raw
        local = opaque(self.source.local(piece))
        target = boxed(raw, item.offset_bytes, piece.box.shape, self.shares.plan.tensors[piece.tensor].dtype)
        if not self.checked:
            copy(target, local)
            return
        apart = _apart(piece.box, [take.box for _, take in takes])
        if not apart:
            copy(target, local)
        for check, take in takes:
            part = take.box.slices(piece.box)
            made = copy_hashed(cut(target, part), cut(local, part)) if apart else digest(cut(local, part))
            at = table_bytes + DIGEST_BYTES * check
            raw[at : at + DIGEST_BYTES] = bytearray(made)

    def _fill_device(self, tensor: torch.Tensor, number: int) -> None:
        """Fill a GPU buffer: copies on its stream, digests made on the host."""
        bucket, table, plan = self.shares.plan.buckets[number], self.shares.tables[number], self.shares.plan
        for item in bucket.items:
            local, dtype = self.source.local(item.piece), getattr(torch, plan.tensors[item.piece.tensor].dtype)
            size_bytes = local.numel() * local.element_size()
            into = tensor[item.offset_bytes : item.offset_bytes + size_bytes].view(dtype).view(local.shape)
            into.copy_(local, non_blocking=True)
        for check, take in enumerate(table.takes if self.checked else ()):
            piece = bucket.items[take.item].piece
            local = self.source.local(piece)[take.box.slices(piece.box)]
            at = table.offset_bytes + DIGEST_BYTES * check
            tensor[at : at + DIGEST_BYTES].copy_(torch.tensor(list(digest(opaque(local.cpu())))))


def _apart(box: Box, parts: list[Box]) -> bool:
    """True where the parts cover the box without overlap: copying each then copies the box once."""
    if len(parts) > _MOST_APART or sum(part.num_elements for part in parts) != box.num_elements:
        return False
    return all(a.meet(b) is None for a, b in itertools.combinations(parts, 2))
