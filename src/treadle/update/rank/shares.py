"""Each worker's part of a plan, and the table of digests after each bucket.

A bucket is followed by digests of the boxes that workers take of it. A box of a large item has its own. Boxes of small
items that the same workers take share one: a digest costs as much as a tensor of some kilobytes. Replicas that take the
same box share its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from treadle.update.memory.copying import DIGEST_BYTES
from treadle.update.protocol.update_messages import Share, TakePlan
from treadle.weights.tensor_boxes import Box
from treadle.weights.update_plan import Item, Take, UpdatePlan

_ALIGN = 64

SMALL_BYTES = 64 << 10
"""Items up to this size are small."""
GROUP_BYTES = 256 << 10
"""Bytes that share a digest: they are in a core's cache when it is made."""


@dataclass(frozen=True)
class Table:
    """The digests of one bucket: take t is in digest `checks[t]`, and they begin at an offset."""

    takes: tuple[Take, ...]
    checks: tuple[int, ...]
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """Bytes of the bucket with its table."""
        return self.offset_bytes + DIGEST_BYTES * self.num_checks

    @cached_property
    def num_checks(self) -> int:
        """How many digests there are."""
        return max(self.checks, default=-1) + 1

    @cached_property
    def index(self) -> dict[tuple[int, Box], int]:
        """The digest of each (item, box)."""
        return {(take.item, take.box): check for take, check in zip(self.takes, self.checks, strict=True)}


@dataclass(frozen=True)
class Shares:
    """A plan with its tables of digests. The same plan makes the same tables on all ranks."""

    plan: UpdatePlan
    columns: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a packer has made of buckets, by number: kept with the plan for the next update."""

    @cached_property
    def digest(self) -> str:
        """The plan's digest."""
        return self.plan.digest()

    def name(self, rank: int, *, exports: bool = False) -> str:
        """Return the name under which a rank's worker keeps its part: one that exports has more of the same plan.

        A worker may have another part when ranks are started again, for another set of workers.
        """
        return f"{self.digest} {rank}{'+' if exports else ''}"

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The table of each bucket."""
        made, distinct = [], list({id(taken): taken for taken in self.plan.takes}.values())
        for number, bucket in enumerate(self.plan.buckets):
            takers: dict[Take, int] = {}
            for place, taken in enumerate(distinct):
                for take in taken[number]:
                    takers[take] = takers.get(take, 0) | 1 << place
            if bucket.dests:
                takers = dict.fromkeys(bucket.all_of_it, 1)
            sizes = [self._item_bytes(item) for item in bucket.items]
            made.append(Table(tuple(takers), _grouped(takers, sizes), -(-bucket.size_bytes // _ALIGN) * _ALIGN))
        return tuple(made)

    def _item_bytes(self, item: Item) -> int:
        return self.plan.tensors[item.piece.tensor].itemsize * item.piece.box.num_elements

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the largest bucket with its table."""
        return max((table.end_bytes for table in self.tables), default=0)

    def of_worker(self, worker: int, *, exports: bool) -> TakePlan:
        """A worker's part of the plan; `exports`: it is the source of its rank's buckets."""
        shares, named = [], set()
        for number in range(len(self.plan.buckets)):
            takes = self.plan.taken(worker, number)
            if takes:
                shares.append(self._share(number, takes))
        given = []
        for number, bucket in enumerate(self.plan.buckets):
            if exports and bucket.source == worker:
                given.append(self._share(number, self.tables[number].takes))
        for share in (*shares, *given):
            named |= {item.piece.tensor for item in share.items}
        tensors = tuple(self.plan.tensors[name] for name in sorted(named))
        return TakePlan(self.name(worker, exports=exports), tensors, tuple(shares), tuple(given))

    def _share(self, number: int, takes: tuple[Take, ...]) -> Share:
        bucket, table = self.plan.buckets[number], self.tables[number]
        used = sorted({take.item for take in takes})
        place = {item: at for at, item in enumerate(used)}
        items: tuple[Item, ...] = tuple(bucket.items[item] for item in used)
        renumbered = tuple(Take(place[take.item], take.box) for take in takes)
        checks = tuple(table.index[take.item, take.box] for take in takes)
        return Share(number, items, renumbered, checks, table.offset_bytes)


def _grouped(takers: Mapping[Take, int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The digest of each take: a new one, or one that it shares. `takers` has a bit for each class of workers."""
    checks: list[int] = []
    open_groups: dict[int, tuple[int, int]] = {}  # by takers: the digest, and the bytes in it
    num = 0
    for take, who in takers.items():
        size = sizes[take.item]
        check, held = open_groups.get(who, (-1, GROUP_BYTES))
        if check < 0 or size > SMALL_BYTES or held + size > GROUP_BYTES:
            check, held, num = num, 0, num + 1
        if size <= SMALL_BYTES:
            open_groups[who] = check, held + size
        checks.append(check)
    return tuple(checks)
