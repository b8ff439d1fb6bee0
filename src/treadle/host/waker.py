"""Ends another thread's wait in a selector, at any time: before the wait, during it, and after all is closed."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Waker:
    """A descriptor for a selector, readable from `wake` to `clear`. Any thread may call any method.

    One thread's `close` waits for another's `wake`: a descriptor that is closed may be another file's at once, and
    `wake` would write into that file.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # a collected object's finalizer may wake inside of either method

    def fileno(self) -> int:
        """Return the descriptor, -1 once it is closed."""
        return self._fd

    def wake(self) -> None:
        """End the current wait, or the next. Does nothing once closed."""
        with self._lock, suppress(BlockingIOError):  # full: it is readable already
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        with self._lock, suppress(BlockingIOError):  # nobody called
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. May be called again."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
