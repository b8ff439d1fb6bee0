"""The commit log on disk: the committed version, its attempts and its workers; and the last attempt's number.

A decision is written to a new file, synced, renamed over the old one, and the directory is synced: after a crash there
is the old decision or the new one. One coordinator at a time holds the log, by a lock; where the lock is lost (shared
storage), the later one has the higher term, and the earlier one can write no more. On disk it is the *ledger*.
A digest in the file shows that its bytes are those that were written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar

import msgspec

from treadle.host.sockets import own_directory
from treadle.update.protocol.record import MOST, Member, Record, committed, led


class _Stored(Record, frozen=True, forbid_unknown_fields=True):
    """A record in its file. Files written before there were digests have none."""

    digest: str = ""


def peek(directory: Path) -> Record:
    """Return the record on disk, read without holding the log: a coordinator may be about to change it."""
    return _read(directory / "ledger.json")


class CommitLog:
    """A commit log, held until it is closed or its process ends. A log without an id gets a random one."""

    def __init__(self, directory: Path) -> None:
        fresh = [path for path in (directory, *directory.parents) if not path.exists()]
        self.directory = own_directory(directory, "others could read or replace the decisions in it")
        for path in fresh:  # a crash could lose an unsynced directory, and the decision in it
            _sync(path.parent)
        self._path = directory / "ledger.json"
        self._lock = _Lock(directory / "ledger.lock")
        if not self._lock.take():
            raise BlockingIOError(
                f"another coordinator holds the ledger in {directory}; end it, or use another directory"
            )
        self._is_written, self._leads = False, False
        self.lease_ns: int | None = None
        self._id = secrets.token_hex(16)
        self._mark = _mark_of(self._path)
        self._record = self._read_in()
        self.members: tuple[Member, ...] = self.record.members
        """The workers of the attempt under way."""
        self._counter = directory / "attempts"
        counted = self._counter.read_bytes() if self._counter.exists() else b""
        known = counted.isdigit() and len(counted) < len(str(MOST))  # a torn file; workers know the last number
        self.attempt = max(int(counted) if known else 0, *self.record.epochs, 0)

    @property
    def record(self) -> Record:
        """The log's content. Where the lock is lost, a coordinator before may write it until this one has."""
        if not self._is_written and _mark_of(self._path) != self._mark:
            with suppress(ValueError):  # what is torn is written anew
                self._mark = _mark_of(self._path)
                self._record = self._read_in()
        return self._record

    def _read_in(self) -> Record:
        record = _read(self._path)
        record = record if record.id else msgspec.structs.replace(record, id=self._id)
        return led(record, self.lease_ns) if self._leads else record

    def lead(self, lease_ns: int | None) -> None:
        """Begin a coordinator's term, in which leases have this length. On disk before one is granted, or counted."""
        self._record = led(self.record, lease_ns)
        self._leads, self.lease_ns = True, lease_ns
        if lease_ns is not None:
            self._write(self.record)

    def begin(self, least: int, record: Record | None = None, members: tuple[Member, ...] = ()) -> int:
        """Number a new attempt: above all before, and above `least`. `record` replaces the log's, if given.

        The log's id and term are on disk when this returns: workers will be told them.
        """
        record = record if record is not None else self.record
        if not self._is_written or record != self.record:
            self._write(record)
        self.members = members
        self.attempt = max(self.attempt, least) + 1
        with _naming(self._counter), self._counter.open("w") as file:
            file.write(str(self.attempt))
            file.flush()
            os.fsync(file.fileno())  # a worker that is absent may know the number
        return self.attempt

    def commit(self, version: int, epoch: int) -> None:
        """Write the decision. It is on disk when this returns."""
        self._write(committed(self.record, version, epoch, self.members, self.lease_ns))

    @property
    def is_lost(self) -> bool:
        """Whether a coordinator of a later term has written the log: this one must not grant, and cannot write."""
        mark = _mark_of(self._path)
        if mark != self._mark and self._later_term() == 0:
            self._mark = mark
        return mark != self._mark

    def _later_term(self) -> int:
        """Return the term on disk, if it is above this one's; else 0."""
        with suppress(ValueError):  # what is torn is written anew
            there = _read(self._path)
            if there.id in ("", self.record.id) and there.term > self.record.term:
                return there.term
        return 0

    def _write(self, record: Record) -> None:
        later = self._later_term()
        if later:
            raise BlockingIOError(
                f"the ledger in {self.directory} is led by another coordinator, of term {later}, this one is of term "
                f"{self.record.term}; end it, or use another directory"
            )
        part = self._path.with_suffix(".part")
        with _naming(part), part.open("wb") as file:
            file.write(msgspec.json.encode(_Stored(**msgspec.structs.asdict(record), digest=_digest(record))))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path)
        _sync(self.directory)
        self._record, self._is_written, self._mark = record, True, _mark_of(self._path)

    def close(self) -> None:
        """Release the log; may be called again."""
        self._lock.give_back()


class _Lock:
    """A lock on a file, exclusive among processes and within this one.

    Children that outlive this process would keep a `flock` lock. A `lockf` lock belongs to the process, which could
    take it twice, and loses it when it closes any descriptor of the file: so each process opens the file once.
    """

    _taken: ClassVar[set[tuple[int, Path]]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._place = os.getpid(), path.resolve()
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Take the lock; False where anybody has it."""
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
        """Release the lock; may be called again."""
        with self._guard:
            if self._file is not None:
                self._file.close()
                self._file = None
                self._taken.discard(self._place)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to the system's error, which lacks it when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        told = f"{error.strerror}; make room there, then try again" if full else error.strerror
        raise OSError(error.errno, told, str(path)) from error


def _mark_of(path: Path) -> tuple[int, int] | None:
    """Return what differs between a file and the next one of its name; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _sync(directory: Path) -> None:
    """Sync a directory: the names in it survive a crash then."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _read(path: Path) -> Record:
    if not path.exists():
        return Record()
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        fields = msgspec.structs.asdict(stored)
        digest = fields.pop("digest")
        record = Record(**fields)
        if digest and digest != _digest(record):
            raise ValueError("its digest is not that of its content")
    except ValueError as error:  # msgspec's errors, too, and bytes that are not UTF-8
        raise ValueError(
            f"{path} is not a ledger ({error}); the committed version is unknown; put the newest copy back, or, if "
            "there is none, use an empty directory and take the workers over (takeover=True, --takeover): they go on "
            "with the version that they serve"
        ) from error
    return record


def _digest(record: Record) -> str:
    """Return a digest of a record without fields that files written before them do not have."""
    fields = msgspec.to_builtins(record)
    for later in [fields, *fields["members"]]:
        for name, default in _LATER.items():
            if name in later and later[name] == default:
                del later[name]
    return hashlib.blake2b(msgspec.json.encode(fields), digest_size=16).hexdigest()


_LATER = {"term": 0, "lease_ns": None, "replica": -1}


__all__ = ["CommitLog", "Member", "Record", "peek"]
