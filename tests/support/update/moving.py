"""A weight update carried out with arrays: cut tensors by `have`, fill buckets, take from them, as the plan says."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_plan import UpdatePlan

Array: TypeAlias = npt.NDArray[Any]
Came: TypeAlias = dict[str, tuple[Array, Array]]

BYTES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
"""Elements are moved, not computed with: any type of their size stands for them."""


def random_tensors(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 8 * t.itemsize, t.shape, BYTES[t.itemsize]) for name, t in tensors.items()}


def held_by(rank: int, holding: Holding, whole: dict[str, Array]) -> dict[Piece, Array]:
    """A rank's pieces, and nothing else of the tensors."""
    return {
        piece: whole[piece.tensor][piece.box.slices(Box.whole(whole[piece.tensor].shape))].copy()
        for piece in holding.pieces[rank]
    }


def pack(plan: UpdatePlan, bucket: int, have: Holding, whole: dict[str, Array]) -> Array:
    """The bytes of a bucket, made from its source's pieces alone; bytes outside of items stay 0xEE."""
    mine = held_by(plan.buckets[bucket].source, have, whole)
    buffer = np.full(plan.buckets[bucket].size_bytes, 0xEE, np.uint8)
    for item in plan.buckets[bucket].items:
        box = item.piece.box
        local = next(
            array[box.slices(piece.box)]
            for piece, array in mine.items()
            if piece.tensor == item.piece.tensor and box.meet(piece.box) == box
        )
        data = np.ascontiguousarray(local).reshape(-1).view(np.uint8)
        place = buffer[item.offset_bytes : item.offset_bytes + data.nbytes]
        assert (place == 0xEE).all(), "two items in one place"
        place[:] = data
    return buffer


def unpack(plan: UpdatePlan, worker: int, bucket: int, buffer: Array, onto: Came) -> None:
    """Adds what a worker takes to `onto`: `onto[name][0]` is what came, `[1]` how often."""
    for take in plan.takes[worker][bucket]:
        item = plan.buckets[bucket].items[take.item]
        tensor = plan.tensors[item.piece.tensor]
        size = tensor.itemsize * item.piece.box.num_elements
        data = buffer[item.offset_bytes : item.offset_bytes + size].view(BYTES[tensor.itemsize])
        part = data.reshape(item.piece.box.shape)[take.box.slices(item.piece.box)]
        where = take.box.slices(Box.whole(tensor.shape))
        onto[tensor.name][0][where] = part
        onto[tensor.name][1][where] += 1


def carry_out(plan: UpdatePlan, have: Holding, whole: dict[str, Array]) -> list[Came]:
    """For each worker and tensor the elements that came (else 0), and how often each came."""
    workers = [
        {name: (np.zeros(t.shape, BYTES[t.itemsize]), np.zeros(t.shape, np.int64)) for name, t in plan.tensors.items()}
        for _ in plan.takes
    ]
    for bucket in range(len(plan.buckets)):
        buffer = pack(plan, bucket, have, whole)
        for worker, onto in enumerate(workers):
            unpack(plan, worker, bucket, buffer, onto)
    return workers
