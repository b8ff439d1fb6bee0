"""Reasons for the silence of processes: they were stopped, or this host is short of cores."""

from __future__ import annotations

from treadle.host.pressure import short_of_cores
from treadle.host.processes import stopped


def why_late(*pids: int) -> str:
    """Return a note to end an error about lateness with, or an empty text where no reason is known."""
    return "".join(map(stopped, pids)) or short_of_cores()
