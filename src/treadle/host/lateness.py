"""Why processes say nothing: they were stopped, or this host is short of cores."""

from __future__ import annotations

from treadle.host.pressure import short_of_cores
from treadle.host.processes import stopped


def why_late(*pids: int) -> str:
    """An aside to end an error about lateness with; nothing where nothing is known."""
    return "".join(map(stopped, pids)) or short_of_cores()
