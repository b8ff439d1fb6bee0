"""Who is to blame where ranks wait in vain: a rank whose broadcast failed cannot tell, the coordinator can."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from treadle.host.lateness import why_late
from treadle.update.coordinator.rank_links import RankLinks
from treadle.update.protocol.control import Fault

HEAR_S = 1.0
"""How long ranks that waited in vain are heard before those that say nothing are blamed."""


class WaitReports:
    """The faults of ranks that waited in vain, of one attempt. Ranks that report none were waited for."""

    def __init__(self) -> None:
        self._faults: dict[int, Fault] = {}
        self._until_s = 0.0

    def clear(self) -> None:
        """Begin another attempt."""
        self._faults.clear()

    def add(self, rank: int, fault: Fault) -> None:
        """A rank has waited in vain. The first report starts the time in which others are heard."""
        if not self._faults:
            self._until_s = time.monotonic() + HEAR_S
        self._faults[rank] = fault

    @property
    def deadlines(self) -> list[float]:
        """When the verdict is due, on the monotonic clock; empty where nobody waited in vain."""
        return [self._until_s] if self._faults else []

    def is_due(self, world: int) -> bool:
        """Return whether all ranks have reported, or the time to do so is over."""
        return bool(self._faults) and (len(self._faults) == world or time.monotonic() > self._until_s)

    def verdict(self, links: RankLinks, cast: Collection[int]) -> Fault:
        """Return the fault of the attempt's ranks that said nothing; where all reported, the first report."""
        rank, fault = next(iter(self._faults.items()))
        silent = [other for other in links if other in cast and other not in self._faults]
        if not silent:
            return fault
        who = ", ".join(f"update rank {other} ({links.peer(other)})" for other in silent)
        aside = why_late(*(links.pid(other) for other in silent))
        text = f"says nothing{aside}; update rank {rank} waited for it: {fault.text}"
        return Fault(fault.epoch, who, fault.phase, fault.bucket, text)


def late_ranks(missing: Iterable[int], links: RankLinks, deadline_s: float) -> tuple[str, str]:
    """Who has not spoken in a phase, and what to say of them."""
    ranks = list(missing)
    who = ", ".join(f"update rank {rank}" for rank in ranks)
    why = links.turned_away or why_late(*(links.pid(rank) for rank in ranks if rank in links))
    return who, f"not heard of within {deadline_s:g} s of the others{why}"
