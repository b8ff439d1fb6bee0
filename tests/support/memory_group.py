"""Memory control groups, which take rights that a machine may not give."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """Yield a group below this process's own with a limit of memory; None where none can be made."""
    paths = {names: path for _, names, path in (line.split(":", 2) for line in _own().splitlines())}
    places = {"memory.limit_in_bytes": _CGROUP / "memory", "memory.max": _CGROUP}
    inside = {"memory.limit_in_bytes": paths.get("memory"), "memory.max": paths.get("")}
    for limit, root in places.items():
        path = inside[limit]
        if path is None or not (root / path.lstrip("/")).is_dir():
            continue
        group = root / path.lstrip("/") / f"treadle-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            with suppress(OSError):
                (group / limit).write_text(str(limit_bytes))
                yield group
                return
        finally:
            _remove(group)
    yield None


def _own() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _remove(group: Path) -> None:
    """Remove a group once its processes are gone."""
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
