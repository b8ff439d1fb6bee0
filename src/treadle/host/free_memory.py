"""How much memory this process can still take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that this process can still allocate: what is unused, or what its own limit leaves.

    None where nothing tells.
    """
    return _least([unused_bytes(proc, cgroup), _limit(proc)])


def unused_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that no process has taken, of the host and of each control group that this one is in.

    Memory counts as taken once it is written to.
    """
    return _least([_host(proc), *_groups(proc, cgroup)])


def _least(found: Iterable[int | None]) -> int | None:
    return min((max(0, each) for each in found if each is not None), default=None)


def _host(proc: Path) -> int | None:
    told = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return 1024 * int(told[1]) if told is not None else None


def _groups(proc: Path, cgroup: Path) -> Iterator[int | None]:
    """What control groups leave: this process's, and those around it, whose limits hold for it, too."""
    inside = {"": "/", "memory": "/"}  # a container may not show where it is, and has its own group as the root
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inside |= dict.fromkeys(controllers.split(","), path)
    for group in _upwards(inside[""]):
        yield _group(cgroup / group, "memory.max", "memory.current", "inactive_file")
    for group in _upwards(inside["memory"]):
        yield _group(cgroup / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(path: str) -> list[PurePosixPath]:
    own = PurePosixPath(path.lstrip("/"))
    return [own, *own.parents]


def _group(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Files that the group has cached count as free."""
    most, now = _text(group / limit).strip(), _text(group / usage).strip()
    if not most.isdecimal() or not now.isdecimal():
        return None
    found = re.search(rf"^{cached} (\d+)", _text(group / "memory.stat"), re.MULTILINE)
    return int(most) - int(now) + (int(found[1]) if found is not None else 0)


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
