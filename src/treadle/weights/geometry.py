"""Geometry of boxes: differences, and cuts into smaller boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from treadle.ir.program import Longs
from treadle.weights.tensor_boxes import Box


def meeting(one: Sequence[Box], other: Sequence[Box]) -> tuple[list[int], list[int]]:
    """Indices of all pairs of boxes that have something in common; none of a box without elements."""
    if not one or not other or not one[0].start:
        full = [(i, j) for i in range(len(one)) for j in range(len(other))]
        return [i for i, _ in full], [j for _, j in full]
    start, stop = _corners(one)
    start2, stop2 = _corners(other)
    common = np.ones((len(one), len(other)), bool)
    for d in range(start.shape[1]):
        low = np.maximum(start[:, None, d], start2[None, :, d])
        high = np.minimum(stop[:, None, d], stop2[None, :, d])
        common &= low < high
    first, second = np.nonzero(common)
    return first.tolist(), second.tolist()


def _corners(boxes: Sequence[Box]) -> tuple[Longs, Longs]:
    return np.array([b.start for b in boxes], np.int64), np.array([b.stop for b in boxes], np.int64)


def subtract(box: Box, taken: Box) -> Iterator[Box]:
    """Subtract a box from another: disjoint boxes, at most two a dimension."""
    common = box.meet(taken)
    if common is None:
        if box.num_elements:
            yield box
        return
    start, stop = list(box.start), list(box.stop)
    for d in range(len(start)):
        if start[d] < common.start[d]:
            yield Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :]))
        if common.stop[d] < stop[d]:
            yield Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop))
        start[d], stop[d] = common.start[d], common.stop[d]


def remove(box: Box, taken: Iterable[Box]) -> list[Box]:
    """Subtract many boxes from one."""
    left = [box] if box.num_elements else []
    for other in taken:
        left = [rest for piece in left for rest in subtract(piece, other)]
    return left


def disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Boxes apart from each other that hold what these hold; earlier ones stay whole."""
    boxes = [box for box in dict.fromkeys(boxes) if box.num_elements]
    first, second = meeting(boxes, boxes)
    earlier: dict[int, list[Box]] = {}
    for i, j in zip(first, second, strict=True):
        if i < j:
            earlier.setdefault(j, []).append(boxes[i])
    return [rest for j, box in enumerate(boxes) for rest in (remove(box, earlier[j]) if j in earlier else [box])]


def joined(boxes: Sequence[Box]) -> list[Box]:
    """Join boxes: neighbours that differ in one dimension only become one."""
    found = list(boxes)
    for d in range(len(found[0].start) if found else 0):
        rows: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
        for box in found:
            rows.setdefault((box.start[:d] + box.start[d + 1 :], box.stop[:d] + box.stop[d + 1 :]), []).append(box)
        found = [box for row in rows.values() for box in _runs(sorted(row, key=lambda b: b.start[d]), d)]
    return sorted(found, key=lambda box: box.start)


def _runs(row: Sequence[Box], d: int) -> Iterator[Box]:
    run = row[0]
    for box in row[1:]:
        if box.start[d] == run.stop[d]:
            run = Box(run.start, (*run.stop[:d], box.stop[d], *run.stop[d + 1 :]))
        else:
            yield run
            run = box
    yield run


def split(box: Box, itemsize: int, limit_bytes: int) -> list[Box]:
    """Boxes of at most so many bytes, about equal: along the first dimension as far as that goes, then the next."""
    if itemsize * box.num_elements <= limit_bytes:
        return [box]
    for d, length in enumerate(box.shape):
        if length == 1:
            continue
        row_bytes = itemsize * math.prod(box.shape[d + 1 :])
        if row_bytes <= limit_bytes:
            return cut(box, d, -(-length // (limit_bytes // row_bytes)))
        return [part for row in cut(box, d, length) for part in split(row, itemsize, limit_bytes)]
    raise ValueError(f"an element of {itemsize} bytes does not fit in {limit_bytes} bytes; give buckets more memory")


def cut(box: Box, d: int, parts: int) -> list[Box]:
    """So many parts along a dimension, none longer than another by more than 1."""
    start, length = box.start[d], box.stop[d] - box.start[d]
    edges = [start + length * i // parts for i in range(parts + 1)]
    return [
        Box((*box.start[:d], low, *box.start[d + 1 :]), (*box.stop[:d], high, *box.stop[d + 1 :]))
        for low, high in pairwise(edges)
        if low < high
    ]
