"""Buckets of changed elements: each is decoded over the elements held, and keeps the way back from them.

The elements held come from the engine, or from the copy that was kept of them, into a memory that has the bucket's
layout. Changed elements are written there, and those that were there take their place in the delta: it leads back then.
From there on the bucket is like one that arrived whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.dist.streams import HOST_MEMORY
from treadle.update.memory.box_columns import BoxColumns
from treadle.update.memory.changed_elements import patch
from treadle.update.memory.copying import copy
from treadle.update.memory.digests import read_digests
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.update_messages import Share
from treadle.update.worker.arrived_boxes import Arrival, StagedArrivals
from treadle.update.worker.rollback_store import on_disk
from treadle.update.worker.worker_plan import WorkerPlan
from treadle.weights.buffer_sizes import aligned
from treadle.weights.tensor_boxes import ITEMSIZE

Read = Callable[[BoxColumns, torch.Tensor, int], str | None]
"""Copies boxes as they are held into a memory; None, or what is wrong. `int`: the first one's number in `kept`."""


@dataclass(frozen=True)
class DecodedBucket:
    """A bucket with its changed elements, the ranges of bytes that have them, and the way back."""

    bucket: int
    arrivals: StagedArrivals
    touched: Sequence[tuple[int, int]]
    back: torch.Tensor


class DeltaBuckets:
    """The deltas of one attempt. `keeps`: the way back is kept, in host memory or in files in `where`.

    With `part` only boxes near changed elements are handed on, where the engine can load a part over the rest.
    """

    def __init__(self, plan: WorkerPlan, read: Read, *, keeps: bool, where: Path | None, part: bool) -> None:
        self.plan, self.keeps = plan, keeps
        self._read, self._where, self._part = read, where, part
        self._back: dict[int, torch.Tensor] = {}
        self._raw = torch.empty(0, dtype=torch.uint8, device=HOST_MEMORY)
        self._device = self._raw.device

    @property
    def size_bytes(self) -> int:
        """Bytes of the way back, so far. From any thread."""
        return sum(len(stream) for stream in list(self._back.values()))

    def decode(self, share: Share, buffer: Buffer, delta_bytes: int, *, checked: bool) -> DecodedBucket:
        """Return a bucket as it is with its changed elements, which are in a buffer. Nothing is loaded yet."""
        if not 0 < aligned(delta_bytes) <= len(buffer.tensor):
            raise ValueError(f"{delta_bytes} bytes of changed elements are not in a buffer of {len(buffer.tensor)}")
        table = read_digests(buffer.tensor, aligned(delta_bytes), share.checks) if checked else {}
        stream = torch.empty(delta_bytes, dtype=torch.uint8, device=HOST_MEMORY)
        copy(stream, buffer.tensor[:delta_bytes])
        self._device = buffer.tensor.device
        touched = self._patch(share, stream, swap=True)
        return DecodedBucket(share.bucket, StagedArrivals(self.plan.staged(share), self._raw, table), touched, stream)

    def keep(self, decoded: DecodedBucket) -> None:
        """Keep the way back from a bucket, before it is loaded."""
        if self.keeps and decoded.touched:
            stream = decoded.back
            if self._where is not None:
                stream = on_disk(self._where, len(stream)).copy_(stream)
            self._back[decoded.bucket] = stream

    def arrivals(self, decoded: DecodedBucket) -> Sequence[Arrival]:
        """Return what is to be loaded of a bucket."""
        whole = StagedArrivals(decoded.arrivals.columns, self._raw, {})
        return _near(whole, decoded.touched) if self._part else whole

    def way_back(self) -> Iterator[Sequence[Arrival]]:
        """Yield bucket by bucket what is to be loaded to go back. A bucket may be loaded, not loaded, or torn."""
        for number, stream in self._back.items():
            share = self.plan.share(number)
            assert share is not None
            touched = self._patch(share, stream)
            whole = StagedArrivals(self.plan.staged(share), self._raw, {})
            yield _near(whole, touched) if self._part else whole

    def _patch(self, share: Share, stream: torch.Tensor, *, swap: bool = False) -> list[tuple[int, int]]:
        """Read the elements held, and write a delta over them."""
        if len(self._raw) < share.table_bytes or self._raw.device != self._device:
            self._raw = torch.empty(share.table_bytes, dtype=torch.uint8, device=self._device)
        error = self._read(self.plan.staged(share).boxes, self._raw, self.plan.first_kept[share.bucket])
        if error is not None:
            raise ValueError(error)
        return patch(self._raw, stream, swap=swap)


def _near(arrivals: StagedArrivals, touched: Sequence[tuple[int, int]]) -> list[Arrival]:
    """The arrivals whose items have bytes in any of the ranges, which are in order and apart."""
    near, at = [], 0
    boxes = arrivals.columns.boxes
    for number in sorted(range(len(boxes)), key=lambda number: boxes.placed[number].offset_bytes):
        start = boxes.placed[number].offset_bytes
        while at < len(touched) and touched[at][1] <= start:
            at += 1
        one = boxes.placed[number]
        if at < len(touched) and touched[at][0] < start + ITEMSIZE[one.dtype] * one.origin.num_elements:
            near.append(arrivals[number])
    return near
