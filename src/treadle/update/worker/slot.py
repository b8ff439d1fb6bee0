"""A worker's slot: a lock on a file beside its socket, held by one process at a time. Only its holder serves.

The lock outlives the socket's file, which anybody may unlink to start the worker in another process. Its holder
releases it by ending, or after closing its engine. The file contains a random id: of two workers with the same id only
one can hold the slot.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid


class Slot:
    """The slot of one endpoint. A second endpoint of the same process takes it once the first could `leave`.

    `leave` closes the engine of the holder for good, and returns whether it has.
    A `lockf` lock belongs to the process, which loses it when it closes any descriptor of the file: so each process
    opens the file once.
    """

    _files: ClassVar[dict[tuple[int, Path], tuple[int, Slot]]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, leave: Callable[[], bool] = lambda: True) -> None:
        self._leave, self._path = leave, path
        self._place = os.getpid(), path.resolve()
        self._fd: int | None = None
        self.held, self.id = False, ""
        self._is_over = False
        self.take()

    def take(self) -> bool:
        """Try to take the slot; whether it is held."""
        if not self._take_over():
            return False
        with self._guard:  # another thread may close the file, or another endpoint take it
            if self._fd is not None and not self.held:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return False
                self.held = True
                self.id = self._read_id()
            return self.held

    def _take_over(self) -> bool:
        """Open the file, or take it from another endpoint of this process, unless that one cannot close."""
        _, other = self._files.get(self._place, (0, self))
        if other is not self and other.held and not other._leave():
            return False
        with self._guard:
            fd, now = self._files.get(self._place, (-1, self))
            if self._is_over or (now is not other and now.held):
                return False
            if fd < 0:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            elif now is not self:
                now._fd, now.held, now._is_over = None, False, True
            self._fd = fd
            self._files[self._place] = fd, self
        return True

    def holder(self) -> int:
        """Return the pid of the holder; 0 where it is unknown."""
        with self._guard:
            if self.held:
                return 0
            if self._fd is None:
                _, other = self._files.get(self._place, (-1, self))
                return os.getpid() if other.held else 0
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return pid if kind != fcntl.F_UNLCK else 0

    def give_back(self) -> None:
        """Release the slot; may be called again."""
        with self._guard:
            if self._fd is not None:
                os.close(self._fd)
                del self._files[self._place]
            self._fd, self.held, self._is_over = None, False, True

    def _read_id(self) -> str:
        """Return the slot's id; its first holder writes it."""
        assert self._fd is not None
        found = os.pread(self._fd, 64, 0).decode(errors="replace")
        if not found:
            found = secrets.token_hex(16)
            os.pwrite(self._fd, found.encode(), 0)
        return found
