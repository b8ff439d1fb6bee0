"""The rollback copy of a worker: the old version, kept until commit.

An engine that can export is read before an update closes it; the copy has the size of what will be overwritten. For one
that cannot, every version is kept as it arrives, so that there are two copies during an update. Memory and files stay
with the worker for the next update, until an update with rollback="none".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.update.protocol.update_messages import Begin
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival, StagedArrivals
from treadle.update.worker.rollback_store import RollbackStore
from treadle.update.worker.worker_plan import WorkerPlan


class RollbackCopy:
    """One worker's rollback copy."""

    def __init__(self, adapter: Adapter, spill: Path | None) -> None:
        self.adapter, self.spill = adapter, spill
        self._old: RollbackStore | None = None
        self._new: RollbackStore | None = None
        self._has_old = False

    @property
    def size_bytes(self) -> int:
        """Bytes held until commit."""
        return sum(store.held_bytes for store in (self._old, self._new) if store is not None)

    @property
    def can_restore(self) -> bool:
        """True where the old version is there, whole."""
        return self._has_old and self._old is not None

    def prepare(self, plan: WorkerPlan, begin: Begin, *, has_version: bool) -> str | None:
        """Make room, and copy what the plan will overwrite; None, or what is wrong."""
        rollback = begin.rollback
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
            self._new = _room(self._new, where)
            return self._new.reserve(plan.kept)
        self._old, self._has_old = _room(self._old, where), False
        if not has_version:
            self._old.forget()
            return None
        return self._old.reserve(plan.kept) or self._read(self._old)

    def _read(self, store: RollbackStore) -> str | None:
        error = self.adapter.export(store.leaving)
        self._has_old = error is None
        return error

    def stash(self, first: int, arrivals: Sequence[Arrival]) -> None:
        """Copy what arrives, for an engine that cannot export it later: the plan's boxes from number `first` on."""
        if not self.adapter.can_export and self._new is not None:
            self._new.take(first, arrivals)

    def arrivals(self) -> StagedArrivals:
        """Return the old version, as arrivals to be loaded again."""
        assert self._old is not None
        return self._old.arrivals

    def commit(self) -> None:
        """Make the new version the rollback copy. Engines that can export their weights need none."""
        if not self.adapter.can_export and self._new is not None:
            self._old, self._new, self._has_old = self._new, self._old, True
        elif self._old is not None:
            self._old.forget()
            self._has_old = False


def _room(store: RollbackStore | None, where: Path | None) -> RollbackStore:
    return store if store is not None and store.where == where else RollbackStore(where)
