"""The numbers of the next versions, which rank 0 writes to a world's store and the other ranks read in turn."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from treadle.dist.rank_world import RankWorld

_LONG = timedelta(days=365)


class AnnouncedVersions:
    """Versions in the store of a world. Each rank makes its own, and reads them in the order in which they came."""

    def __init__(self, world: RankWorld) -> None:
        self._store = PrefixStore("treadle/update/versions", world.store)
        self._number = 0

    def announce(self, version: int) -> None:
        """Write the version of the next update."""
        self._number += 1
        self._store.set(str(self._number), str(version))

    def next(self) -> int:
        """Wait, however long, for the next update, and return its version."""
        self._number += 1
        key = str(self._number)
        self._store.wait([key], _LONG)
        return int(self._store.get(key))
