"""The rollback copy of a worker: the old version, kept until commit.

An engine that can export is read before an update closes it; the copy has the size of what will be overwritten. For one
that cannot, every version is kept as it arrives, so that there are two copies during an update. Memory and files stay
with the worker for the next update, until an update with rollback="none".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.update.protocol.update_messages import Begin, TakePlan
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival
from treadle.update.worker.rollback_store import RollbackStore
from treadle.weights.tensor_boxes import Box, Piece


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

    def prepare(self, plan: TakePlan, begin: Begin, *, has_version: bool) -> str | None:
        """Make room, and copy what the plan will overwrite; None, or what is wrong."""
        rollback = begin.rollback
        if rollback == "none":
            self._old = self._new = None
            self._has_old = False
            return None
        if rollback == "disk" and self.spill is None:
            return "rollback='disk' needs a directory; give the endpoint one as `spill`"
        where = self.spill if rollback == "disk" else None
        boxes = _boxes(plan)
        if not self.adapter.can_export:
            if begin.partial:  # a part of a version is nothing to go back to
                return "this engine takes all tensors or none"
            self._new = _room(self._new, where)
            return _reserve(self._new, boxes)
        self._old, self._has_old = _room(self._old, where), False
        if not has_version:
            self._old.forget()
            return None
        return _reserve(self._old, boxes) or self._read(self._old)

    def _read(self, store: RollbackStore) -> str | None:
        for name, box, kept in store.items():
            error = self.adapter.export(Piece(name, box), kept)
            if error is not None:
                return error
        self._has_old = True
        return None

    def stash(self, arrivals: Sequence[Arrival]) -> None:
        """Copy what arrives, for an engine that cannot export it later."""
        if self.adapter.can_export or self._new is None:
            return
        for arrival in arrivals:
            arrival.copy_into(self._new.tensor(arrival.name, arrival.box))

    def arrivals(self) -> list[Arrival]:
        """Return the old version, as arrivals to be loaded again."""
        assert self._old is not None
        return [Arrival(name, box, kept) for name, box, kept in self._old.items()]

    def commit(self) -> None:
        """Return the new version becomes the rollback copy. Engines that can export their weights need none."""
        if not self.adapter.can_export and self._new is not None:
            self._old, self._new, self._has_old = self._new, self._old, True
        elif self._old is not None:
            self._old.forget()
            self._has_old = False


def _boxes(plan: TakePlan) -> list[tuple[str, Box, str]]:
    dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}
    named = [(share.items[take.item].piece.tensor, take.box) for share in plan.shares for take in share.takes]
    return [(name, box, dtypes[name]) for name, box in named]


def _room(store: RollbackStore | None, where: Path | None) -> RollbackStore:
    return store if store is not None and store.where == where else RollbackStore(where)


def _reserve(store: RollbackStore, boxes: list[tuple[str, Box, str]]) -> str | None:
    return store.refusal(store.needs(boxes)) or store.reserve(boxes)
