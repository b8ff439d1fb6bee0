"""The kernel's view of a process of this host."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STOPPED = {"T": "by SIGSTOP or from a terminal", "t": "by a debugger"}


def stopped(pid: int) -> str:
    """Return a note if a process is stopped; empty if it runs or is unknown, as those of other hosts (pid 0)."""
    if pid <= 0:
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    by = _STOPPED.get(stat.rpartition(")")[2].split()[0])  # the name, in brackets, may hold any characters
    return f" (process {pid} is stopped, {by}; let it go on with: kill -CONT {pid})" if by is not None else ""


def ended(pid: int) -> bool:
    """Return True where a process of this host is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def no_descriptor_left() -> str:
    """Return why this process cannot open or receive another descriptor, and the way out."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"process {os.getpid()} has as many files open as it may, {limit}; raise its limit (ulimit -n), or close some"
    )
