"""Packs buckets of an update of changed elements: on the host, against the copy of the committed version.

A thread encodes a rank's buckets one after the other, ahead of their turns, since all ranks must know the size of a
bucket before it moves.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from types import TracebackType

import torch

from treadle.dist.streams import HOST_MEMORY
from treadle.host.pressure import short_of_cores
from treadle.update.memory.changed_elements import ElementRun, room_for
from treadle.update.memory.copying import copy
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.committed_share import CommittedShare
from treadle.update.rank.shares import Shares
from treadle.weights.buffer_sizes import ALIGN, aligned
from treadle.weights.update_plan import UpdatePlan


def runs_of(plan: UpdatePlan, number: int) -> list[ElementRun]:
    """A bucket's items as few runs. What lies between two items of a run is padding."""
    runs: list[ElementRun] = []
    for item in plan.buckets[number].items:
        itemsize = plan.tensors[item.piece.tensor].itemsize
        first, num = item.offset_bytes, item.piece.box.num_elements
        last = runs[-1] if runs else None
        if last is not None and last.itemsize == itemsize:
            end = last.offset_bytes + last.num_elements * itemsize
            if 0 <= first - end < ALIGN:
                runs[-1] = last._replace(num_elements=(first - last.offset_bytes) // itemsize + num)
                continue
        runs.append(ElementRun(first, num, itemsize))
    return runs


def delta_room(plan: UpdatePlan) -> int:
    """Return the most bytes that changed elements of a bucket take beside their own."""
    return max((room_for(runs_of(plan, number)) for number in range(len(plan.buckets))), default=0) + ALIGN


class NotedPacker:
    """Fills buffers with whole buckets, and notes them for the next update."""

    def __init__(self, shares: Shares, packer: Packer, share: CommittedShare) -> None:
        self.shares, self.packer, self.share = shares, packer, share
        self._raw = torch.empty(0, dtype=torch.uint8, device=HOST_MEMORY)

    def fill(self, buffer: Buffer, number: int) -> None:
        """Put a bucket and its digests into a buffer."""
        self.note(number)
        end = self.shares.tables[number].end_bytes
        copy(buffer.tensor[:end], self._raw[:end])

    def note(self, number: int) -> torch.Tensor:
        """Pack a bucket, and return what is noted of it."""
        plan, table = self.shares.plan, self.shares.tables[number]
        if not len(self._raw):
            self._raw = torch.empty(self.shares.buffer_bytes, dtype=torch.uint8, device=HOST_MEMORY)
        size_bytes = plan.buckets[number].size_bytes
        self._raw[:size_bytes].zero_()  # padding is compared, too
        self.packer.pack(self._raw[: table.end_bytes], number)
        return self.share.note(number, self._raw[:size_bytes], runs_of(plan, number))

    def table(self, number: int) -> torch.Tensor:
        """A copy of the digests of the bucket that was packed last."""
        table = self.shares.tables[number]
        return self._raw[table.offset_bytes : table.end_bytes].clone()


class DeltaPacker:
    """Encodes this rank's buckets, ahead of their turns, and fills buffers with them."""

    def __init__(self, packer: NotedPacker, own: list[int], deadline_s: float) -> None:
        self._packer, self._deadline_s = packer, deadline_s
        self._thread = ThreadPoolExecutor(1, "treadle deltas")
        self._made: dict[int, Future[tuple[torch.Tensor, torch.Tensor]]] = {
            number: self._thread.submit(self._encode, number) for number in own
        }

    def _encode(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._packer.note(number), self._packer.table(number)

    def _of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._made[number].result(self._deadline_s)
        except LateError:
            late = f"this rank did not encode bucket {number} within {self._deadline_s:g} s{short_of_cores()}"
            raise RuntimeError(late) from None

    def size_bytes(self, number: int) -> int:
        """Return the bytes of a bucket's changed elements, once they are encoded."""
        return len(self._of(number)[0])

    def fill(self, buffer: Buffer, number: int) -> None:
        """Put the changed elements of a bucket, and its digests, into a buffer."""
        stream, table = self._of(number)
        copy(buffer.tensor[: len(stream)], stream)
        begin = aligned(len(stream))
        copy(buffer.tensor[begin : begin + len(table)], table)

    def __enter__(self) -> DeltaPacker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)
