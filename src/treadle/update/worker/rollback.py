"""The rollback copy of a worker: the old version, kept until commit.

An engine that can export is read before an update closes it; the copy has the size of what will be overwritten. For one
that cannot, every version is kept as it arrives, so that there are two copies during an update. Memory and files stay
with the worker for the next update, until an update with rollback="none". A delta to an engine that can export keeps
the elements that it overwrites, and no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from treadle.update.memory.box_columns import BoxColumns
from treadle.update.protocol.update_messages import Begin
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival, Leaving
from treadle.update.worker.delta_buckets import DeltaBuckets
from treadle.update.worker.rollback_store import RollbackStore
from treadle.update.worker.worker_plan import WorkerPlan


class RollbackCopy:
    """One worker's rollback copy."""

    def __init__(self, adapter: Adapter, spill: Path | None) -> None:
        self.adapter, self.spill = adapter, spill
        self._old: RollbackStore | None = None
        self._new: RollbackStore | None = None
        self._has_old = False
        self._layout = self._next_layout = ""
        """The plans whose boxes `_old` and `_new` have."""
        self.deltas: DeltaBuckets | None = None
        """What decodes the buckets of this attempt, if it brings changed elements."""

    @property
    def size_bytes(self) -> int:
        """Bytes held until commit. From any thread."""
        deltas, stores = self.deltas, (self._old, self._new)
        held = sum(store.held_bytes for store in stores if store is not None)
        return held + (deltas.size_bytes if deltas is not None else 0)

    @property
    def can_restore(self) -> bool:
        """True where the old version is there, whole, or the way back to it."""
        if self.deltas is not None and self.adapter.can_export:
            return self.deltas.keeps
        return self._has_old and self._old is not None

    @property
    def base(self) -> str:
        """The plan whose boxes are kept as they were committed, of an engine that cannot export; empty if none are."""
        return self._layout if not self.adapter.can_export and self._has_old and self._old is not None else ""

    def prepare(self, plan: WorkerPlan, begin: Begin, *, has_version: bool) -> str | None:
        """Make room, and copy what the plan will overwrite; None, or what is wrong."""
        rollback, digest = begin.rollback, plan.plan.digest
        if begin.delta and not self.adapter.can_export and (self.base != digest or rollback == "none"):
            return "the engine cannot export, and no copy of what it serves was kept by this plan"
        self.deltas = None
        if begin.delta:
            where = self.spill if rollback == "disk" else None
            part = self.adapter.can_export and not self.adapter.whole
            self.deltas = DeltaBuckets(plan, self._read_boxes, keeps=rollback != "none", where=where, part=part)
        if rollback == "none":
            self._old = self._new = None
            self._has_old = False
            return None
        if rollback == "disk" and self.spill is None:
            return "rollback='disk' needs a directory; give the endpoint one as `spill`"
        where = self.spill if rollback == "disk" else None
        if not self.adapter.can_export:
            if begin.partial:  # a part of a version is nothing to go back to
                return "this engine takes all tensors or none"
            self._new, self._next_layout = _room(self._new, where), digest
            return self._new.reserve(plan.kept)
        self._old, self._has_old = _room(self._old, where), False
        if not has_version or begin.delta:
            self._old.forget()
            return None
        return self._old.reserve(plan.kept) or self._read(self._old)

    def _read(self, store: RollbackStore) -> str | None:
        error = self.adapter.export(store.leaving)
        self._has_old = error is None
        return error

    def _read_boxes(self, boxes: BoxColumns, raw: torch.Tensor, first: int) -> str | None:
        """Copy boxes as they are served into a memory; None, or what is wrong."""
        if self.adapter.can_export:
            return self.adapter.export(Leaving(boxes, raw))
        assert self._old is not None
        self._old.give(boxes, raw, first)
        return None

    def stash(self, first: int, arrivals: Sequence[Arrival]) -> None:
        """Copy what arrives, for an engine that cannot export it later: the plan's boxes from number `first` on."""
        if not self.adapter.can_export and self._new is not None:
            self._new.take(first, arrivals)

    def arrivals(self) -> Iterator[Sequence[Arrival]]:
        """Yield what is to be loaded again to go back to the old version."""
        if self.deltas is not None and self.adapter.can_export:
            yield from self.deltas.way_back()
            self.deltas = None
        else:
            assert self._old is not None
            yield self._old.arrivals

    def commit(self) -> None:
        """Make the new version the rollback copy. Engines that can export their weights need none."""
        self.deltas = None
        if not self.adapter.can_export and self._new is not None:
            self._old, self._new, self._has_old = self._new, self._old, True
            self._layout = self._next_layout
        elif self._old is not None:
            self._old.forget()
            self._has_old = False


def _room(store: RollbackStore | None, where: Path | None) -> RollbackStore:
    return store if store is not None and store.where == where else RollbackStore(where)
