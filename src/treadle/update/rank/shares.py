"""Each worker's part of a plan, and the table of digests after each bucket.

A bucket is followed by one digest for each box that a worker takes of it, in the order in which workers and their takes
first name the boxes. Replicas that take the same box share a digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from treadle.update.memory.copying import DIGEST_BYTES
from treadle.update.protocol.update_messages import Share, TakePlan
from treadle.weights.tensor_boxes import Box
from treadle.weights.update_plan import Item, Take, UpdatePlan

_ALIGN = 64


@dataclass(frozen=True)
class Table:
    """The digests of one bucket: of which boxes, and at which offset."""

    takes: tuple[Take, ...]
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """Bytes of the bucket with its table."""
        return self.offset_bytes + DIGEST_BYTES * len(self.takes)

    @cached_property
    def of_item(self) -> dict[int, tuple[tuple[int, Take], ...]]:
        """The takes of each item, with their indices in the table."""
        made: dict[int, list[tuple[int, Take]]] = {}
        for at, take in enumerate(self.takes):
            made.setdefault(take.item, []).append((at, take))
        return {item: tuple(takes) for item, takes in made.items()}

    @cached_property
    def index(self) -> dict[tuple[int, Box], int]:
        """The index of each (item, box) in the table."""
        return {(take.item, take.box): at for at, take in enumerate(self.takes)}


@dataclass(frozen=True)
class Shares:
    """A plan with its tables of digests. The same plan makes the same tables on all ranks."""

    plan: UpdatePlan

    @cached_property
    def digest(self) -> str:
        """The plan's digest."""
        return self.plan.digest()

    def name(self, *, exports: bool) -> str:
        """Return the name under which a worker keeps its part: one that exports has more of the same plan."""
        return self.digest + "+" if exports else self.digest

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The table of each bucket."""
        made, distinct = [], list({id(taken): taken for taken in self.plan.takes}.values())
        for number, bucket in enumerate(self.plan.buckets):
            takes: dict[tuple[int, Box], Take] = {}
            for taken in distinct:
                for take in taken[number]:
                    takes.setdefault((take.item, take.box), take)
            boxes = tuple(takes.values()) if bucket.dest < 0 else bucket.all_of_it
            made.append(Table(boxes, -(-bucket.size_bytes // _ALIGN) * _ALIGN))
        return tuple(made)

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
        return TakePlan(self.name(exports=exports), tensors, tuple(shares), tuple(given))

    def _share(self, number: int, takes: tuple[Take, ...]) -> Share:
        bucket, table = self.plan.buckets[number], self.tables[number]
        used = sorted({take.item for take in takes})
        place = {item: at for at, item in enumerate(used)}
        items: tuple[Item, ...] = tuple(bucket.items[item] for item in used)
        renumbered = tuple(Take(place[take.item], take.box) for take in takes)
        checks = tuple(table.index[take.item, take.box] for take in takes)
        return Share(number, items, renumbered, checks, table.offset_bytes)
