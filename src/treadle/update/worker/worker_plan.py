"""A worker's part of a plan as columns, made once and kept with it: what arrives, what is exported, what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from treadle.update.memory.box_columns import BoxColumns, PlacedBox, SharedDigest
from treadle.update.protocol.update_messages import Share, TakePlan, WeightLayout
from treadle.update.worker.arrived_boxes import StagedColumns
from treadle.weights.geometry import disjoint
from treadle.weights.tensor_boxes import ITEMSIZE, Box, Piece

_ALIGN = 64


class WorkerPlan:
    """A plan that a worker has taken. Raises ValueError for one that would read outside of a tensor or an item."""

    def __init__(self, plan: TakePlan) -> None:
        check_plan(plan)
        self.plan = plan
        self.buckets = frozenset(share.bucket for share in plan.shares)
        self._dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}
        self._shares = {share.bucket: share for share in plan.shares}
        self._exports = {share.bucket: share for share in plan.exports}
        self._staged: dict[int, StagedColumns] = {}
        self._checked: tuple[WeightLayout, list[str]] | None = None

    def share(self, bucket: int) -> Share | None:
        """What the worker takes of a bucket; None where that is nothing."""
        return self._shares.get(bucket)

    def export(self, bucket: int) -> Share | None:
        """What the worker exports as a bucket; None where that is nothing."""
        return self._exports.get(bucket)

    def staged(self, share: Share) -> StagedColumns:
        """The boxes that are taken of a bucket, in its buffer. Made once."""
        made = self._staged.get(share.bucket)
        if made is None:
            made = self._staged[share.bucket] = self.columns_of(share)
        return made

    def columns_of(self, share: Share) -> StagedColumns:
        """The takes of a share as columns, with the digests that they have alone or share."""
        items, placed = share.items, []
        for take in share.takes:
            item = items[take.item]
            name = item.piece.tensor
            placed.append(PlacedBox(name, take.box, self._dtypes[name], item.offset_bytes, item.piece.box))
        boxes, by_check = BoxColumns(placed), dict[int, list[int]]()
        for at, check in enumerate(share.checks):
            by_check.setdefault(check, []).append(at)
        alone = {ats[0]: check for check, ats in by_check.items() if len(ats) == 1}
        shared = {check: SharedDigest(boxes, ats) for check, ats in by_check.items() if len(ats) > 1}
        return StagedColumns(boxes, alone, shared)

    def items_of(self, share: Share) -> BoxColumns:
        """The items of a share, in its buffer."""
        pieces = ((item.piece, item.offset_bytes) for item in share.items)
        return BoxColumns(PlacedBox(p.tensor, p.box, self._dtypes[p.tensor], at, p.box) for p, at in pieces)

    @cached_property
    def kept(self) -> BoxColumns:
        """All boxes that are taken, one after the other in a memory of their own."""
        placed, at = [], 0
        for share in self.plan.shares:
            for take in share.takes:
                name = share.items[take.item].piece.tensor
                dtype = self._dtypes[name]
                placed.append(PlacedBox(name, take.box, dtype, at, take.box))
                at += -(-ITEMSIZE[dtype] * take.box.num_elements // _ALIGN) * _ALIGN
        return BoxColumns(placed)

    @cached_property
    def first_kept(self) -> dict[int, int]:
        """The number in `kept` of the first box of each bucket."""
        first, at = {}, 0
        for share in self.plan.shares:
            first[share.bucket] = at
            at += len(share.takes)
        return first

    def shortfall(self, layout: WeightLayout) -> list[str]:
        """Names of tensors of which the plan brings more or fewer elements than a layout wants."""
        if self._checked is None or self._checked[0] is not layout:
            self._checked = layout, shortfall(self.plan, layout.pieces)
        return self._checked[1]


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
            if item.offset_bytes < 0:
                raise ValueError(f"{item.piece.tensor} {item.piece.box} begins at byte {item.offset_bytes}")
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
    for name, boxes in boxes_by_name(wanted).items():
        apart = disjoint(boxes) if len(boxes) > 1 else boxes  # elements in two boxes come once
        comes[name] = comes.get(name, 0) - sum(box.num_elements for box in apart)
    return sorted(name for name, elements in comes.items() if elements)


def boxes_by_name(pieces: Iterable[Piece]) -> dict[str, list[Box]]:
    """Return the boxes of each tensor, each once."""
    boxes: dict[str, list[Box]] = {}
    for piece in pieces:
        some = boxes.setdefault(piece.tensor, [])
        if piece.box not in some:
            some.append(piece.box)
    return boxes
