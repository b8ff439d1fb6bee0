"""Between a buffer and an engine: a worker's share of a bucket as arrivals, and the export of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from treadle.update.memory.copying import boxed, digest
from treadle.update.memory.digests import read_digests, write_digests
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.update_messages import Share, TakePlan
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival, Assembly
from treadle.weights.geometry import disjoint
from treadle.weights.tensor_boxes import Box, Piece


def check_plan(plan: TakePlan) -> None:
    """Raise ValueError for a plan that would read outside of a tensor or an item."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    for share in (*plan.shares, *plan.exports):
        if len(share.takes) != len(share.checks) or share.table_bytes < 0 or min(share.checks, default=0) < 0:
            raise ValueError(f"bucket {share.bucket} has {len(share.takes)} takes and {len(share.checks)} checks")
        for item in share.items:
            tensor = tensors.get(item.piece.tensor)
            if tensor is None or not _within(item.piece.box, Box.whole(tensor.shape)):
                raise ValueError(f"{item.piece.tensor} {item.piece.box} is not in the plan's tensors")
        for take in share.takes:
            if not 0 <= take.item < len(share.items):
                raise ValueError(f"bucket {share.bucket} has no item {take.item}")
            if not _within(take.box, share.items[take.item].piece.box):
                raise ValueError(f"{take.box} is not within item {take.item} of bucket {share.bucket}")


def _within(box: Box, outer: Box) -> bool:
    if len(box.start) != len(outer.start):
        return False
    sides = zip(box.start, box.stop, outer.start, outer.stop, strict=True)
    return all(low <= start and stop <= high for start, stop, low, high in sides)


def shortfall(plan: TakePlan, wanted: Sequence[Piece]) -> list[str]:
    """Names of tensors of which a plan brings more or fewer elements than are wanted."""
    comes: dict[str, int] = {}
    for share in plan.shares:
        for take in share.takes:
            name = share.items[take.item].piece.tensor
            comes[name] = comes.get(name, 0) + take.box.num_elements
    for name, boxes in _by_name(wanted).items():
        apart = disjoint(boxes) if len(boxes) > 1 else boxes  # elements in two boxes come once
        comes[name] = comes.get(name, 0) - sum(box.num_elements for box in apart)
    return sorted(name for name, elements in comes.items() if elements)


def _by_name(pieces: Sequence[Piece]) -> dict[str, list[Box]]:
    """Return the boxes of each tensor, each once."""
    boxes: dict[str, list[Box]] = {}
    for piece in pieces:
        some = boxes.setdefault(piece.tensor, [])
        if piece.box not in some:
            some.append(piece.box)
    return boxes


def arrivals_of(plan: TakePlan, share: Share, buffer: Buffer, *, checked: bool) -> list[Arrival]:
    """Return the boxes that a worker takes of a bucket in a buffer."""
    items = _items(plan, share, buffer)
    made = []
    table = read_digests(buffer.tensor, share.table_bytes, share.checks) if checked else dict[int, bytes]()
    for take, check in zip(share.takes, share.checks, strict=True):
        piece = share.items[take.item].piece
        part = items[take.item][take.box.slices(piece.box)]
        made.append(Arrival(piece.tensor, take.box, part, table.get(check)))
    return made


def _items(plan: TakePlan, share: Share, buffer: Buffer) -> list[torch.Tensor]:
    """Return the elements of each item of a share, in the buffer."""
    dtypes, raw = {tensor.name: tensor.dtype for tensor in plan.tensors}, buffer.tensor
    return [boxed(raw, item.offset_bytes, item.piece.box.shape, dtypes[item.piece.tensor]) for item in share.items]


def assembled(assembly: Assembly, parts: Iterable[Arrival], wanted: Sequence[Piece]) -> list[Arrival]:
    """Return the wanted pieces that these parts complete. A part may belong to several pieces."""
    boxes, whole = _by_name(wanted), []
    for part in parts:
        meeting = [(box, common) for box in boxes[part.name] if (common := part.box.meet(box)) is not None]
        if not meeting:
            raise ValueError(f"{part.name} {part.box} was never wanted")
        for box, common in meeting:
            done = assembly.add(_part_of(part, common), box)
            if done is not None:
                whole.append(done)
    return whole


def _part_of(part: Arrival, box: Box) -> Arrival:
    """A part of an arrival. It has no digest: that of the whole arrival is checked after `load`."""
    if box == part.box:
        return part
    return Arrival(part.name, box, part.tensor[box.slices(part.box)])


def export_bucket(adapter: Adapter, plan: TakePlan, share: Share, buffer: Buffer, *, checked: bool) -> str | None:
    """Copy a bucket of an engine's weights, and its digests, into a buffer; None, or what went wrong."""
    out = _items(plan, share, buffer)
    for item, into in zip(share.items, out, strict=True):
        error = adapter.export(item.piece, into)
        if error is not None:
            return error
    if checked:
        boxes = [take.box.slices(share.items[take.item].piece.box) for take in share.takes]
        made = [digest(out[take.item][box]) for take, box in zip(share.takes, boxes, strict=True)]
        write_digests(buffer.tensor, share.table_bytes, dict(zip(share.checks, made, strict=True)))
    return None
