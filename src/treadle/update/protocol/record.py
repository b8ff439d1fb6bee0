"""The content of a commit log: its id, the committed version, and the workers that it was committed on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec

from treadle.update.protocol.update_messages import Status

MOST = 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""A number that fits into a message."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker of the set. `slot` is the id of its slot, `incarnation` that of the endpoint that held it.

    `replica` is the number of the first worker of its engine.
    """

    worker: int
    slot: str
    incarnation: str
    pid: int
    host: str
    replica: int = -1

    @property
    def name(self) -> str:
        """The worker's name for error messages."""
        return f"worker {self.worker} (process {self.pid}{f' on {self.host}' if self.host else ''})"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The committed `version`, and the attempts that committed it: the first, and later recoveries.

    `id` is the log's own; files written before logs had ids have none. `took` are logs that committed this version
    before this log took their workers over. `term` numbers the log's coordinators; `lease_ns` is the longest lease that
    a worker may have, None for one without end.
    """

    version: Count | None = None
    epochs: tuple[Count, ...] = ()
    id: str = ""
    members: tuple[Member, ...] = ()
    took: tuple[str, ...] = ()
    term: Count = 0
    lease_ns: Count | None = None

    @cached_property
    def incarnations(self) -> frozenset[str]:
        """The members' incarnations. Asked at every report of a worker."""
        return frozenset(member.incarnation for member in self.members)


def replica_of(worker: Member | Status) -> int:
    """Return the replica that a worker belongs to; by itself it is one."""
    return worker.replica if worker.replica >= 0 else worker.worker


def member_of(status: Status) -> Member:
    """A worker as the log records it."""
    return Member(status.worker, status.slot, status.incarnation, status.pid, status.host, status.replica)


def committed(
    record: Record, version: int, epoch: int, members: tuple[Member, ...], lease_ns: int | None = None
) -> Record:
    """Return the record after a decision. The same version again is a recovery.

    Of a new version no lease was granted yet; leases on the same one stay as long as they are.
    """
    if record.version == version:
        return msgspec.structs.replace(record, epochs=(*record.epochs, epoch), members=members)
    return Record(version, (epoch,), record.id, members, (), record.term, lease_ns)


def led(record: Record, lease_ns: int | None) -> Record:
    """Return the record of the next coordinator, which grants leases of this length."""
    longest = lease_ns
    if record.version is not None:  # of a version there may be leases by coordinators before
        longest = max(record.lease_ns, lease_ns) if record.lease_ns is not None and lease_ns is not None else None
    return msgspec.structs.replace(record, term=record.term + 1, lease_ns=longest)


def has_committed(record: Record, status: Status) -> bool:
    """Return whether a worker holds, or has staged, what is committed."""
    origins = ("", record.id, *record.took)
    holds = status.version == record.version and status.content in record.epochs and status.origin in origins
    return record.version is not None and (holds or (status.staged in record.epochs and status.log == record.id))


def taken_over(record: Record, statuses: Sequence[Status], members: tuple[Member, ...]) -> Record:
    """Return the record of a log that takes workers over from a lost one.

    An empty log commits to the version that they all serve, if it is one version of one log: they go on serving it.
    """
    logs, versions = {status.log for status in statuses}, {status.version for status in statuses}
    all_serve = all(status.state == "serving" for status in statuses)
    if record.version is not None or not all_serve or len(logs) > 1 or len(versions) > 1:
        return record
    epochs = tuple(sorted({status.content for status in statuses}))
    took = tuple(sorted({status.origin for status in statuses} | logs))
    return Record(versions.pop(), epochs, record.id, members, took, record.term)


def missing_members(members: Sequence[Member], workers: Iterable[int]) -> list[Member]:
    """Members for which no update rank speaks."""
    present = set(workers)
    return [member for member in members if member.worker not in present]


def replaced_members(members: Sequence[Member], statuses: dict[int, Status]) -> list[Member]:
    """Members in whose place a worker with another slot is now: they may still serve elsewhere.

    A new process in the same slot is no such case: it got the slot when the one before had closed or ended.
    """
    return [
        member
        for member in members
        if member.worker in statuses and member.slot and statuses[member.worker].slot != member.slot
    ]


def is_outdated(record: Record, status: Status) -> bool:
    """True where this very log committed a worker's version after all that it knows: it is an older copy of itself."""
    return bool(record.id) and status.origin == record.id and status.content > max(record.epochs, default=0)


def is_foreign(record: Record, log: str) -> bool:
    """Return whether a worker's log is neither this one nor one that this one took over."""
    return bool(log) and log != record.id and log not in record.took
