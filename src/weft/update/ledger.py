"""The coordinator's memory: which version is committed, on disk before it is told; and how many attempts there were.

A decision is a file written beside the old one, synced, renamed over it, and the directory synced: after a crash there
is the old decision or the new one. One process at a time holds the ledger.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from weft.update.wire.sockets import own_directory


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`version` was committed by the attempts `epochs`: the first moved it, later ones brought it to lost workers."""

    version: int | None = None
    epochs: tuple[int, ...] = ()


def peek(directory: Path) -> Record:
    """What is committed, as far as anybody can tell who does not hold the ledger."""
    return _read(directory / "ledger.json")


class Ledger:
    """Held until it is closed or its process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = own_directory(directory)
        self._path = directory / "ledger.json"
        self._lock = (directory / "ledger.lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: that would be inherited by children
        except OSError as error:
            self._lock.close()
            raise BlockingIOError(
                f"another coordinator holds the ledger in {directory}; end it, or use another directory"
            ) from error
        self.record = _read(self._path)
        self._counter = directory / "attempts"
        counted = self._counter.read_text() if self._counter.exists() else ""
        self.attempt = max(int(counted) if counted.isdecimal() else 0, *self.record.epochs, 0)

    def begin(self, least: int) -> int:
        """The number of a new attempt, larger than any before and than `least`."""
        self.attempt = max(self.attempt, least) + 1
        self._counter.write_text(str(self.attempt))  # not synced: workers know of every attempt that reached them
        return self.attempt

    def commit(self, version: int, epoch: int) -> None:
        """Decides. When this returns, the decision outlives this process."""
        epochs = (*self.record.epochs, epoch) if self.record.version == version else (epoch,)
        self._write(Record(version, epochs))

    def _write(self, record: Record) -> None:
        part = self._path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self.record = record

    def close(self) -> None:
        """Lets go of it."""
        self._lock.close()


def _read(path: Path) -> Record:
    if not path.exists():
        return Record()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a ledger ({error}); the committed version is unknown; remove it to start over, which "
            "closes every worker until the next update"
        ) from error
