"""The kernel's view of another process of this host."""

from __future__ import annotations

from pathlib import Path

_STOPPED = {"T": "by SIGSTOP or from a terminal", "t": "by a debugger"}


def stopped(pid: int) -> str:
    """Returns a note if a process is stopped; empty if it runs or is unknown, as those of other hosts (pid 0)."""
    if pid <= 0:
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    by = _STOPPED.get(stat.rpartition(")")[2].split()[0])  # the name, in brackets, may hold any characters
    return f" (process {pid} is stopped, {by}; let it go on with: kill -CONT {pid})" if by is not None else ""
