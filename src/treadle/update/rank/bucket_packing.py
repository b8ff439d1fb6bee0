"""Packs a source's pieces into a bucket, with the digests of the boxes that workers will take."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch

from treadle.update.memory.box_columns import BoxColumns, PlacedBox, SharedDigest
from treadle.update.memory.copying import copy, copy_hashed, digest, on_host
from treadle.update.memory.device_sums import Sums
from treadle.update.memory.digests import write_digests
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.rank.shares import SMALL_BYTES, Shares
from treadle.update.rank.source import WeightSource
from treadle.weights.tensor_boxes import Box
from treadle.weights.update_plan import Take, UpdatePlan

_MOST_APART = 64


class BucketColumns:
    """The items of a bucket, the takes of large ones, and digests of small ones by the item that completes them."""

    def __init__(self, shares: Shares, number: int) -> None:
        plan, table = shares.plan, shares.tables[number]
        items = plan.buckets[number].items
        self.pieces = [item.piece for item in items]
        self.items = BoxColumns(_placed(plan, number, Take(at, piece.box)) for at, piece in enumerate(self.pieces))
        self.takes: dict[int, list[tuple[int, Box]]] = {}
        self.digests: dict[int, list[tuple[int, SharedDigest]]] = {}
        sharing: dict[int, list[int]] = {}
        for at, (take, check) in enumerate(zip(table.takes, table.checks, strict=True)):
            if self.items.size_bytes[take.item] > SMALL_BYTES:
                self.takes.setdefault(take.item, []).append((check, take.box))
            else:
                sharing.setdefault(check, []).append(at)
        self.taken = BoxColumns(_placed(plan, number, take) for take in table.takes)
        for check, ats in sharing.items():
            last = max(table.takes[at].item for at in ats)
            self.digests.setdefault(last, []).append((check, SharedDigest(self.taken, ats)))

    def groups(self, checks: Sequence[int]) -> list[list[int]]:
        """Return the takes that are in each digest, in the order of their bytes."""
        of: dict[int, list[int]] = {}
        for at, check in enumerate(checks):
            of.setdefault(check, []).append(at)
        return [SharedDigest(self.taken, of[check]).boxes for check in sorted(of)]


def _placed(plan: UpdatePlan, number: int, take: Take) -> PlacedBox:
    item = plan.buckets[number].items[take.item]
    name = item.piece.tensor
    return PlacedBox(name, take.box, plan.tensors[name].dtype, item.offset_bytes, item.piece.box)


class Packer:
    """Fills buffers with buckets of a source; `checked`: with digests, `sums`: as workers on a device make them."""

    def __init__(self, shares: Shares, source: WeightSource, *, checked: bool, sums: bool = False) -> None:
        self.shares, self.source = shares, source
        self.hashed, self.summed = checked and not sums, checked and sums

    def fill(self, buffer: Buffer, number: int) -> None:
        """Put bucket `number` and its table of digests into the buffer; on a device, on the current stream."""
        self.pack(buffer.tensor, number)

    def pack(self, raw: torch.Tensor, number: int) -> None:
        """Put bucket `number` and its table of digests into a memory."""
        columns = self._columns(number)
        items, digests = columns.items, dict[int, bytes]()
        items.check_room(raw)
        base = raw.data_ptr() if on_host(raw) else 0
        for at, piece in enumerate(columns.pieces):
            local, size_bytes = self.source.local(piece), items.size_bytes[at]
            takes = columns.takes.get(at, ()) if self.hashed else ()
            if takes:
                digests |= _pack(items.view(raw, at), local, piece.box, takes)
            elif base and local.is_cpu and local.is_contiguous() and local.nbytes == size_bytes:
                ctypes.memmove(base + items.start[at], local.data_ptr(), size_bytes)
            else:
                copy(items.view(raw, at), local)
            for check, shared in columns.digests.get(at, ()) if self.hashed else ():
                digests[check] = shared.of(raw)
        table = self.shares.tables[number]
        if self.summed:
            views = ([columns.taken.view(raw, at) for at in ats] for ats in columns.groups(table.checks))
            raw[table.offset_bytes : table.end_bytes].copy_(Sums(raw).table(views))
        else:
            write_digests(raw, table.offset_bytes, digests)

    def _columns(self, number: int) -> BucketColumns:
        made = self.shares.columns.get(number)
        if made is None:
            made = self.shares.columns[number] = BucketColumns(self.shares, number)
        assert isinstance(made, BucketColumns)
        return made


def _pack(target: torch.Tensor, local: torch.Tensor, box: Box, takes: Sequence[tuple[int, Box]]) -> dict[int, bytes]:
    """Copy an item; the digests of its takes."""
    parts = [(check, take.slices(box)) for check, take in takes]
    if _apart(box, [take for _, take in takes]):
        return {check: copy_hashed(target[part], local[part]) for check, part in parts}
    copy(target, local)
    return {check: digest(local[part]) for check, part in parts}


def _apart(box: Box, parts: list[Box]) -> bool:
    """Return whether the parts cover the box without overlap: copying each then copies the box once."""
    if len(parts) > _MOST_APART or sum(part.num_elements for part in parts) != box.num_elements:
        return False
    return all(a.meet(b) is None for a, b in itertools.combinations(parts, 2))
