"""Whether this host was short of cores: a process that waits for a core looks as if it hung."""

from __future__ import annotations

import re
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
_MUCH = 50.0


def short_of_cores(path: Path = _PRESSURE) -> str:
    """Return a note to end an error about lateness with; empty where cores are free or the host does not report it."""
    try:
        told = re.search(r"^some avg10=([\d.]+)", path.read_text())
    except OSError:
        return ""
    waited = float(told[1]) if told is not None else 0.0
    if waited < _MUCH:
        return ""
    return f" (this host is short of cores: in {waited:.0f} % of the last ten seconds something waited for one)"
