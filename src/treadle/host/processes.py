"""What the kernel tells of another process of this host."""

from __future__ import annotations

from pathlib import Path

_STOPPED = {"T": "by SIGSTOP or from a terminal", "t": "by a debugger"}


def stopped(pid: int) -> str:
    """An aside where a process is stopped; nothing where it runs or is not known here, as those of other hosts (0)."""
    if pid <= 0:
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    by = _STOPPED.get(stat.rpartition(")")[2].split()[0])  # its name, in brackets, may have anything in it
    return f" (process {pid} is stopped, {by}; let it go on with: kill -CONT {pid})" if by is not None else ""
