"""Unix sockets that only their owner can open.

They lie in a directory of mode 0700, and both ends check the other's uid. The mode alone would trust whoever made the
directory first; the uid alone would let other users fill the queue.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from treadle.host.processes import ended

_CREDENTIALS = struct.Struct("3i")
_LONGEST = 107  # bytes of sun_path, less the terminating zero

_own: WeakSet[socket.socket] = WeakSet()


@dataclass(frozen=True)
class Peer:
    """The process at the other end."""

    pid: int
    uid: int


def own_directory(path: Path, why: str = "others could reach the sockets in it") -> Path:
    """Make the directory. Raises PermissionError if other users could reach into it; `why` completes the error."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a directory of uid {os.getuid()} with mode 0700, it has uid {status.st_uid} and mode "
            f"{stat.S_IMODE(status.st_mode):04o}; {why}; chmod 700 {path}, or use another"
        )
    return path


def close_in_children(own: socket.socket) -> None:
    """Has processes that this one forks close their copy: a child that outlives it would keep the socket open."""
    _own.add(own)


def _close_copies() -> None:
    for copy in list(_own):
        copy.close()


os.register_at_fork(after_in_child=_close_copies)


def listen(path: Path) -> socket.socket:
    """Return a server at `path`. The socket of a process that has ended is replaced."""
    own_directory(path.parent)
    if len(os.fsencode(path)) > _LONGEST:
        raise ValueError(f"{path} is longer than the {_LONGEST} bytes a Unix socket's path may have; use a shorter one")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(server)
    try:
        with _alone_in(path.parent):
            if path.exists() and not _is_listening(path):
                path.unlink()
            server.bind(os.fspath(path))
            path.chmod(0o600)
            server.listen(128)
    except OSError as error:
        server.close()
        if path.exists() and _is_listening(path):
            raise FileExistsError(f"another process listens at {path}; end it, or use another directory") from error
        raise
    return server


def place_of(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file at `path`, or None if there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def close_server(server: socket.socket, path: Path | None = None, place: tuple[int, int] | None = None) -> None:
    """Close a server; a thread in `accept` gets an OSError. Removes `path`; with `place`, only if it is that file."""
    if path is not None and (place is None or place_of(path) == place):
        path.unlink(missing_ok=True)  # first: after the close, the path may be a successor's
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def connect(path: Path) -> socket.socket:
    """Return a connection to the server at `path`. Raises PermissionError if it is another user's."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(os.fspath(path))
        refuse_strangers(client)
    except OSError:
        client.close()
        raise
    return client


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that made the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def refuse_strangers(connection: socket.socket) -> Peer:
    """Return the process at the other end. Raises PermissionError if it is another user's."""
    peer = peer_of(connection)
    if peer.uid != os.getuid():
        raise PermissionError(f"process {peer.pid} belongs to uid {peer.uid}, this one to {os.getuid()}; refused")
    return peer


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One process at a time: a socket that is bound and does not listen yet looks like that of one that has ended."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(opened)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full: the process is stopped, or busy
            return True
        except OSError:
            return False
        pid = peer_of(probe).pid  # of the process that listens; 0 where it is in another pid namespace
        return pid <= 0 or not ended(pid)  # a child of one that has ended may hold its socket
