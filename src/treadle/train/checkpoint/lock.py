"""The lock of a directory that one run writes to at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
import weakref
from datetime import datetime
from pathlib import Path

LOCK = "lock"


class DirectoryLock:
    """Holds a directory until it is released or this process ends, however it ends: the kernel keeps the lock.

    The file stays. It names who has held the directory last, and has a token by which another node sees that it is the
    same file. Filesystems without flock have no lock (`missing` has the reason): NFS without a lock service, others.

    Raises:
        ValueError: Another process holds the directory; the message names it.

    """

    def __init__(self, directory: Path) -> None:
        self.token = uuid.uuid4().hex
        self.missing: str | None = None
        opened = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, opened)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(opened, 1024, 0).decode(errors="replace").partition("\n")[2].strip()
            self.release()
            raise ValueError(
                f"{directory} is in use by another run ({holder or 'its lock file is empty'}); end that run, or choose "
                "another directory with --output or --checkpoint.directory"
            ) from None
        except OSError as error:
            self.missing = error.strerror
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(opened, 0)
        os.pwrite(opened, f"{self.token}\nprocess {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
        os.fsync(opened)


def token_in(directory: Path) -> str | None:
    """Return the token of a directory's lock as this process sees it; None if it sees none."""
    try:
        return (directory / LOCK).read_text(errors="replace").partition("\n")[0]
    except OSError:
        return None
