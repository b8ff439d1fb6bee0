"""The coordinator's memory: which version is committed, by whom, on disk before it is told; and how many attempts.

A decision is a file written beside the old one, synced, renamed over it, and the directory synced: after a crash there
is the old decision or the new one. One coordinator at a time holds the ledger.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, ClassVar

import msgspec

from treadle.host.sockets import own_directory
from treadle.update.protocol.record import MOST, Member, Record, committed


def peek(directory: Path) -> Record:
    """What is committed, as far as anybody can tell who does not hold the ledger."""
    return _read(directory / "ledger.json")


class CommitLog:
    """Held until it is closed or its process ends. A log gets its random id when it is new, or was written without."""

    def __init__(self, directory: Path) -> None:
        fresh = [path for path in (directory, *directory.parents) if not path.exists()]
        self.directory = own_directory(directory, "others could read or replace the decisions in it")
        for path in fresh:  # else a crash could take the directory, and the decision in it
            _sync(path.parent)
        self._path = directory / "ledger.json"
        self._lock = _Lock(directory / "ledger.lock")
        if not self._lock.take():
            raise BlockingIOError(
                f"another coordinator holds the ledger in {directory}; end it, or use another directory"
            )
        self.record = _read(self._path)
        self.members: tuple[Member, ...] = self.record.members
        """Of the attempt under way."""
        self._named = bool(self.record.id)
        if not self._named:
            self.record = msgspec.structs.replace(self.record, id=secrets.token_hex(16))
        self._counter = directory / "attempts"
        counted = self._counter.read_bytes() if self._counter.exists() else b""
        known = counted.isdigit() and len(counted) < len(str(MOST))  # else it is torn, and workers know better
        self.attempt = max(int(counted) if known else 0, *self.record.epochs, 0)

    def begin(self, least: int, record: Record | None = None, members: tuple[Member, ...] = ()) -> int:
        """The number of a new attempt, larger than any before and than `least`. `record` is what it starts from.

        The log's id outlives this process from here on: workers will be told.
        """
        if not self._named or (record is not None and record != self.record):
            self._write(record if record is not None else self.record)
        self.members = members
        self.attempt = max(self.attempt, least) + 1
        with _naming(self._counter):  # not synced: workers know of every attempt that reached them
            self._counter.write_text(str(self.attempt))
        return self.attempt

    def commit(self, version: int, epoch: int) -> None:
        """Decides. When this returns, the decision outlives this process."""
        self._write(committed(self.record, version, epoch, self.members))

    def _write(self, record: Record) -> None:
        part = self._path.with_suffix(".part")
        with _naming(part), part.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path)
        _sync(self.directory)
        self.record, self._named = record, True

    def close(self) -> None:
        """Lets go of it."""
        self._lock.give_back()


class _Lock:
    """Of a file, and of its place in this process.

    A lock by `flock` would be kept by children that outlive this process. One by `lockf` is this process's, which may
    then take it twice, and lose it as soon as any descriptor of the file is closed: so the file is opened once.
    """

    _taken: ClassVar[set[tuple[int, Path]]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._place = os.getpid(), path.resolve()
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Not where anybody has it."""
        with self._guard:
            if self._place in self._taken:
                return False
            file = self._path.open("w")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return False
            self._taken.add(self._place)
            self._file = file
            return True

    def give_back(self) -> None:
        """May be called again."""
        with self._guard:
            if self._file is not None:
                self._file.close()
                self._file = None
                self._taken.discard(self._place)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Writes the path into what the system says, which is not always there: not when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        told = f"{error.strerror}; make room there, then try again" if full else error.strerror
        raise OSError(error.errno, told, str(path)) from error


def _sync(directory: Path) -> None:
    """Names in it outlive a crash."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _read(path: Path) -> Record:
    if not path.exists():
        return Record()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except ValueError as error:  # msgspec's are such, and what is not UTF-8
        raise ValueError(
            f"{path} is not a ledger ({error}); the committed version is unknown; remove it to start over, which "
            "closes every worker until the next update"
        ) from error


__all__ = ["CommitLog", "Member", "Record", "peek"]
