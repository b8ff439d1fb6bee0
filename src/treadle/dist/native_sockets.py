"""Getting a main thread out of a native wait.

gloo's `abort()` does not end a pending receive, nor does anything else it offers. Shutting the TCP connections that a
group made does: the wait raises as if its peer had closed. Listening sockets are left out, as gloo terminates the
process when one of those fails.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Sockets:
    """The sockets that came into being while groups were made.

        sockets = Sockets()
        with sockets.recording():
            group = dist.new_group(...)
        watch.on_alarm(sockets.shut)

    Record what makes groups and nothing else: not `init_process_group` (its store is none of a group's), not
    `Watch.join`. Where a backend connects on first use, record the first use. What other threads opened meanwhile is
    recorded too: where there may be any, ranks tell each other their `ports` and `keep` what is between those.
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

    @property
    def ports(self) -> list[int]:
        """The ports at which recorded sockets listen."""
        return [own for own, _, listens in map(_ends, self._inodes, self._inodes.values()) if listens]

    def keep(self, ports: Iterable[int]) -> None:
        """Forgets what is neither from nor to one of these ports."""
        kept, known = {}, set(ports) - {0}
        for fd, inode in self._inodes.items():
            own, other, _ = _ends(fd, inode)
            if {own, other} & known:
                kept[fd] = inode
        self._inodes = kept

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
    """Shuts a connection."""
    with suppress(OSError), _copy(fd, inode) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _ends(fd: int, inode: int) -> tuple[int, int, bool]:
    """The ports of a TCP socket's ends, 0 where there is none, and whether it listens."""
    with suppress(OSError), _copy(fd, inode) as connection:
        own = int(connection.getsockname()[1])
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return own, 0, True
        return own, int(connection.getpeername()[1]), False
    return 0, 0, False


def _copy(fd: int, inode: int) -> socket.socket:
    """The TCP socket with this inode, as a copy that nobody else closes; OSError if `fd` is no longer that one."""
    copy = os.dup(fd)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        raise OSError(errno.EBADF, f"{fd} is another socket by now")
    made = socket.socket(fileno=copy)
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        made.close()
        raise OSError(errno.EAFNOSUPPORT, f"{fd} is no TCP socket")
    return made
