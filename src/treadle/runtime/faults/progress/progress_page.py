"""A rank's progress in memory that outlives it.

A rank writes the number of each op into a page of its own: some 50 ns, without a system call. The page is an anonymous
file, so nothing is left in /dev/shm. Neighbours in the same pid namespace map the page, and can read the exact op of a
rank that was killed or stopped.
"""

from __future__ import annotations

import mmap
import os
import signal
from array import array
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from treadle.runtime.faults.progress.wait_target import NOBODY

OP, WAITS_FOR, STEP = range(3)
"""The slots that the main thread writes: the number of its op, its wait target, the number of the step."""

OUTSIDE = -1
"""In slot OP: the rank is not in a step."""

_NUM_SLOTS = 4  # the last holds the mark
_SIZE_BYTES = 8 * _NUM_SLOTS


class Snapshot(NamedTuple):
    """A copy of the slots at one moment."""

    op: int
    waits_for: int
    step: int


class ProgressPage:
    """The page of this rank. Its `mark` tells it from another file that has the same descriptor later."""

    def __init__(self, mark: int) -> None:
        self.fd = os.memfd_create("treadle-progress")
        os.ftruncate(self.fd, _SIZE_BYTES)
        page = memoryview(mmap.mmap(self.fd, _SIZE_BYTES)).cast("q")
        page[OP], page[WAITS_FOR], page[STEP], page[3] = OUTSIDE, NOBODY, -1, mark
        self.slots = page[:3]

    def look(self) -> Snapshot:
        """Returns a copy of the slots."""
        return Snapshot(*self.slots)

    def close(self) -> None:
        """Closes the file. The page itself lives as long as its slots are referred to, so a late write does no harm."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.slots = memoryview(array("q", self.slots))


class PageReader:
    """The page and the process of another rank in the same pid namespace."""

    def __init__(self, pidfd: int, page: mmap.mmap) -> None:
        self.pidfd, self._page = pidfd, page

    @classmethod
    def open(cls, pid: int, fd: int, mark: int) -> PageReader | None:
        """Opens the page of a living process. Returns None where that is not permitted or the mark differs."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                page = mmap.mmap(other, _SIZE_BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(other)
            if int.from_bytes(page[24:32], "little", signed=True) == mark:
                return cls(pidfd, page)
            page.close()
        except (OSError, ValueError):
            pass  # not permitted, or ended: heartbeats must do
        os.close(pidfd)
        return None

    def look(self) -> Snapshot:
        """Returns the slots as the other rank wrote them last, whether it is alive or not."""
        with memoryview(self._page) as page, page.cast("q") as slots:
            return Snapshot(slots[OP], slots[WAITS_FOR], slots[STEP])

    def kill(self) -> None:
        """Sends SIGKILL by pidfd: a later process with the same pid cannot be hit."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Closes the page and the pidfd."""
        self._page.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def namespace_id(kind: str) -> bytes:
    """Returns 16 bytes that two processes share exactly if they share a host and its namespace ("pid", "net")."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        inode = Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return os.urandom(16)  # unique: no process is taken for one of this host
    return blake2b(f"{boot.strip()} {kind} {inode}".encode(), digest_size=16).digest()
