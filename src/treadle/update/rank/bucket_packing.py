"""Packs a source's pieces into a bucket, with the digests of the boxes that workers will take."""

from __future__ import annotations

import itertools

from treadle.update.memory.copying import boxed, copy, copy_hashed, digest
from treadle.update.memory.digests import write_digests
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import WeightSource
from treadle.weights.tensor_boxes import Box
from treadle.weights.update_plan import Item, Take

_MOST_APART = 64


class Packer:
    """Fills buffers with buckets of a source; `checked`: with digests."""

    def __init__(self, shares: Shares, source: WeightSource, *, checked: bool) -> None:
        self.shares, self.source, self.checked = shares, source, checked

    def fill(self, buffer: Buffer, number: int) -> None:
        """Put bucket `number` and its table of digests into the buffer; on a device, on the current stream."""
        bucket, table = self.shares.plan.buckets[number], self.shares.tables[number]
        digests: dict[int, bytes] = {}
        for at, item in enumerate(bucket.items):
            digests |= self._pack(buffer, item, table.of_item.get(at, ()) if self.checked else ())
        write_digests(buffer.tensor, table.offset_bytes, digests)

    def _pack(self, buffer: Buffer, item: Item, takes: tuple[tuple[int, Take], ...]) -> dict[int, bytes]:
        """Copy an item; the digests of these takes."""
        piece = item.piece
        local = self.source.local(piece)
        target = boxed(buffer.tensor, item.offset_bytes, piece.box.shape, self.shares.plan.tensors[piece.tensor].dtype)
        parts = [(check, take.box.slices(piece.box)) for check, take in takes]
        if takes and _apart(piece.box, [take.box for _, take in takes]):
            return {check: copy_hashed(target[part], local[part]) for check, part in parts}
        copy(target, local)
        return {check: digest(local[part]) for check, part in parts}


def _apart(box: Box, parts: list[Box]) -> bool:
    """Return whether the parts cover the box without overlap: copying each then copies the box once."""
    if len(parts) > _MOST_APART or sum(part.num_elements for part in parts) != box.num_elements:
        return False
    return all(a.meet(b) is None for a, b in itertools.combinations(parts, 2))
