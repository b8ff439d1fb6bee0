"""Getting a main thread out of a native wait.

gloo's `abort()` does not end a pending receive, nor does anything else it offers. Shutting the TCP connections that a
group made does: the wait raises as if its peer had closed. Listening sockets are left out, as gloo terminates the
process when one of those fails.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Sockets:
    """The sockets that came into being while groups were made.

        sockets = Sockets()
        with sockets.recording():
            group = dist.new_group(...)
        watch.on_alarm(sockets.shut)

    Record what makes groups and nothing else: not `init_process_group` (its store is none of a group's), not
    `Watch.join`. Where a backend connects on first use, record the first use.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._inodes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Takes note of the sockets that are there at the end and were not at the beginning."""
        before = set(_open_sockets().items())
        try:
            yield
        finally:
            self._inodes |= dict(_open_sockets().items() - before)

    def shut(self) -> None:
        """Shuts the connections that were recorded and are still there. Any thread may call it, more than once."""
        for fd, inode in list(self._inodes.items()):
            _shut(fd, inode)


def _open_sockets() -> dict[int, int]:
    """The inode of each open socket, which unlike its number is never given again."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since: the directory's own, or another thread's
            status = path.stat()
            if stat.S_ISSOCK(status.st_mode):
                found[int(path.name)] = status.st_ino
    return found


def _shut(fd: int, inode: int) -> None:
    """Shuts the connection if `fd` still is the socket with this inode, as seen on a copy that nobody else closes."""
    with suppress(OSError):
        copy = os.dup(fd)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
