"""The sockets of native communicators, shut to get a thread out of a native wait.

No function of gloo ends a pending receive, `abort()` included. Shutting the group's TCP connections does: the wait
raises as if its peer had closed. Listening sockets are left alone, as gloo terminates the process when one fails.
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
    """The sockets that were opened while groups were made.

        sockets = Sockets()
        with sockets.recording():
            group = dist.new_group(...)
        watch.on_alarm(sockets.shut)

    Record calls that make groups and nothing else: not `init_process_group`, whose store is no group's, and not
    `Watch.join`. Where a backend connects on first use, record the first use. Sockets that other threads open
    meanwhile are recorded too: to exclude them, ranks exchange their `ports` and `keep` connections between those.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._inodes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the sockets that are open at the end of the block and were not at its beginning."""
        before = set(_open_sockets().items())
        try:
            yield
        finally:
            self._inodes |= dict(_open_sockets().items() - before)

    @property
    def ports(self) -> list[int]:
        """The ports of recorded sockets that listen."""
        return [own for own, _, listens in map(_ends, self._inodes, self._inodes.values()) if listens]

    def keep(self, ports: Iterable[int]) -> None:
        """Forgets sockets that are neither at nor connected to one of these ports."""
        kept, known = {}, set(ports) - {0}
        for fd, inode in self._inodes.items():
            own, other, _ = _ends(fd, inode)
            if {own, other} & known:
                kept[fd] = inode
        self._inodes = kept

    def shut(self) -> None:
        """Shuts the recorded connections that are still open. Any thread may call it, more than once."""
        for fd, inode in list(self._inodes.items()):
            _shut(fd, inode)


def _open_sockets() -> dict[int, int]:
    """Return the inode of each open socket: unlike a descriptor, an inode is not used again."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since, by the iteration itself or another thread
            status = path.stat()
            if stat.S_ISSOCK(status.st_mode):
                found[int(path.name)] = status.st_ino
    return found


def _shut(fd: int, inode: int) -> None:
    """Shuts a connection; listening sockets are left alone."""
    with suppress(OSError), _copy(fd, inode) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _ends(fd: int, inode: int) -> tuple[int, int, bool]:
    """Return the own and the peer's port of a TCP socket, 0 for none, and whether it listens."""
    with suppress(OSError), _copy(fd, inode) as connection:
        own = int(connection.getsockname()[1])
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return own, 0, True
        return own, int(connection.getpeername()[1]), False
    return 0, 0, False


def _copy(fd: int, inode: int) -> socket.socket:
    """Return a duplicate of the TCP socket with this inode. Raises OSError if `fd` is another socket by now."""
    copy = os.dup(fd)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        raise OSError(errno.EBADF, f"{fd} is another socket by now")
    made = socket.socket(fileno=copy)
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        made.close()
        raise OSError(errno.EAFNOSUPPORT, f"{fd} is no TCP socket")
    return made
