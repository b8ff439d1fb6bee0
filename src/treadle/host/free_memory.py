"""How much memory this process can still take."""

from __future__ import annotations

import re
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that this process can still take: the host's, its control group's or its own limit's least.

    None where nothing tells.
    """
    found = [_host(proc), _group(cgroup), _limit(proc)]
    return min((max(0, each) for each in found if each is not None), default=None)


def _host(proc: Path) -> int | None:
    told = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return 1024 * int(told[1]) if told is not None else None


def _group(cgroup: Path) -> int | None:
    """Files that the group has cached count as free."""
    most, now = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if not most.isdecimal() or not now.isdecimal():
        return None
    cached = re.search(r"^inactive_file (\d+)", _text(cgroup / "memory.stat"), re.MULTILINE)
    return int(most) - int(now) + (int(cached[1]) if cached is not None else 0)


def _limit(proc: Path) -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(proc / "self" / "statm").split()
    if most == resource.RLIM_INFINITY or not pages:
        return None
    return most - int(pages[0]) * resource.getpagesize()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
