"""A worker's place in its directory, held by one process at a time: only its holder serves.

A lock on a file beside the socket. It outlives the socket's file, which anybody may unlink to start a worker in another
process; the lock goes with the process that holds it, or when that has closed its engine. The file says a random id:
two workers that show the same id cannot both hold it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import ClassVar

_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid


class Slot:
    """Of one endpoint. `lockf` is of a process, and lost when any descriptor of the file closes: so it is opened once.

    A second endpoint of the same process takes it from the first.
    """

    _files: ClassVar[dict[tuple[int, Path], tuple[int, Slot]]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._place = os.getpid(), path.resolve()
        self._fd: int | None = None
        self.held, self.id = False, ""
        with self._guard:
            mine = self._files.pop(self._place, None)
            if mine is not None:
                self._fd, other = mine
                other._fd, other.held = None, False
            else:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files[self._place] = self._fd, self
        self.take()

    def take(self) -> bool:
        """Whether it is held; tries to get it if not."""
        if self._fd is not None and not self.held:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            self.held = True
            self.id = self._read_id()
        return self.held

    def holder(self) -> int:
        """The process that holds it; 0 where that is this one, or cannot be told."""
        if self._fd is None or self.held:
            return 0
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return pid if kind != fcntl.F_UNLCK else 0

    def give_back(self) -> None:
        """May be called again."""
        with self._guard:
            if self._fd is not None:
                os.close(self._fd)
                del self._files[self._place]
            self._fd, self.held = None, False

    def _read_id(self) -> str:
        """Whoever holds it first writes it."""
        assert self._fd is not None
        found = os.pread(self._fd, 64, 0).decode(errors="replace")
        if not found:
            found = secrets.token_hex(16)
            os.pwrite(self._fd, found.encode(), 0)
        return found
