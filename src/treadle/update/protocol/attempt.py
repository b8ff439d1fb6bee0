"""One attempt as the coordinator sees it: what every rank has said, and what follows from it. Pure: no sockets.

    enter ──> settle ──> layout ──> plan ──> begin ──> finish (the vote) ──> open

A phase ends when all ranks have reported in it. The decision lies between the reports of `finish` and their answer.
Ranks below `callers` call for updates and take part in each. Agents, the ranks from there on, are called: all that have
joined, by a number that tells their answers from those to earlier calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from treadle.host.errors import TreadleError
from treadle.update.protocol.buffer_device import DifferentDevicesError, common_device
from treadle.update.protocol.catalogue import layout_digest, list_layouts
from treadle.update.protocol.control import Asked, Enter, Fault, Layouts, Phase, Report
from treadle.update.protocol.leases import Leases
from treadle.update.protocol.record import (
    MOST,
    Member,
    Record,
    is_foreign,
    is_outdated,
    member_of,
    missing_members,
    replaced_members,
    replica_of,
    taken_over,
)
from treadle.update.protocol.update_messages import Describe, Status, WeightLayout

NO_LAYOUT = WeightLayout((), ())
"""The layout of a rank that takes no part."""


class AttemptRefusedError(TreadleError, ValueError):
    """An attempt cannot go on: `who` is to blame, the text has the reason."""

    def __init__(self, who: str, text: str) -> None:
        super().__init__(text)
        self.who = who


@dataclass(frozen=True)
class Attempt:
    """The entries and reports so far, by rank: `settled` are those of that phase, `said` those of the present one.

    `own`: what the coordinator itself has begun, for agents alone. `call` is the number of the last call, `called` are
    the agents it went to, `left_out` those that did not enter in time, with the reason. `grouped` is the last attempt
    that made a process group, its ranks, and their type of device.
    """

    callers: int
    epoch: int = 0
    phase: Phase = "enter"
    committed: bool = False
    entered: dict[int, Enter] = field(default_factory=dict)
    settled: dict[int, Report] = field(default_factory=dict)
    said: dict[int, Report] = field(default_factory=dict)
    own: Asked | None = None
    call: int = 0
    called: frozenset[int] = frozenset()
    left_out: Mapping[int, str] = field(default_factory=dict)
    grouped: tuple[int, tuple[int, ...], str] = (0, (), "")

    @property
    def statuses(self) -> dict[int, Status]:
        """The status of each rank's worker when the rank entered, of ranks that have one, in order."""
        return {rank: entry.status for rank, entry in sorted(self.entered.items()) if entry.status is not None}

    @property
    def workers(self) -> dict[int, Status]:
        """The status of each worker when its rank entered."""
        return {status.worker: status for status in self.statuses.values()}

    @property
    def first(self) -> Enter:
        """One rank's entry: all ranks enter alike."""
        return next(iter(self.entered.values()))

    @property
    def asked(self) -> Asked:
        """What the attempt is for."""
        return self.own if self.own is not None else self.first.asked

    @property
    def is_idle(self) -> bool:
        """Return whether nothing has begun."""
        return not self.entered and self.own is None

    @property
    def cast(self) -> tuple[int, ...]:
        """The ranks that take part, in order: before the attempt has its number, those that are waited for."""
        if self.phase != "enter":
            return tuple(sorted(self.entered))
        return (*(range(self.callers) if self.own is None else ()), *sorted(self.called))

    @property
    def num_cast(self) -> int:
        """How many ranks take part. Asked after every message: it takes as long for many ranks as for few."""
        if self.phase != "enter":
            return len(self.entered)
        return (self.callers if self.own is None else 0) + len(self.called)

    @property
    def spoken(self) -> Collection[int]:
        """Ranks that have reported in this phase."""
        return self.entered if self.phase == "enter" else self.said

    def refuse_entries(self, record: Record, leases: Leases, where: str = "") -> None:
        """Raise AttemptRefusedError where ranks ask for different or impossible things, or find other workers."""
        first, asked = self.first, self.asked
        self._refuse_speakers()
        for rank, entry in self.entered.items():
            if entry.fault is not None:
                raise AttemptRefusedError(entry.fault.who, entry.fault.text)
            if not entry.away and (entry.worker is None) != (entry.status is None):
                raise AttemptRefusedError(f"update rank {rank}", "it does not report how its worker stands")
        for rank, entry in self.entered.items():
            if entry.asked != asked:
                raise AttemptRefusedError(f"update rank {rank}", _difference(entry, first, next(iter(self.entered))))
        if not self.statuses:
            away = "; ".join(f"worker {e.worker}: {e.away}" for _, e in sorted(self.entered.items()) if e.away)
            none = "none of them speaks for a worker; start a rank beside each worker (worker=)"
            raise AttemptRefusedError("the update ranks", f"no worker takes part; {away}" if away else none)
        self._refuse_logs(record, where)
        self._refuse_set(record, leases)
        self._refuse_devices()
        record = self.start_from(record)
        if asked.kind == "update" and record.version is not None and asked.version <= record.version:
            raise AttemptRefusedError(
                "the caller", f"version {asked.version} is not newer than {record.version}, which is committed"
            )
        if asked.kind == "recover" and record.version is None:
            text = "no version was ever committed, so there is none to recover; update first"
            other = "the workers do not all serve one version of one log, so there is none to go on with; update first"
            raise AttemptRefusedError("the caller", other if asked.takeover else text)
        if asked.kind == "recover" and asked.version not in (0, record.version):
            raise AttemptRefusedError(
                "the caller", f"the source has version {asked.version}, version {record.version} is committed"
            )

    @property
    def device(self) -> str:
        """The type of the device that buffers are on."""
        return common_device({rank: entry.device for rank, entry in sorted(self.entered.items())})

    def _refuse_devices(self) -> None:
        """Refuse ranks that would make different process groups, and wait in vain for each other there."""
        try:
            _ = self.device
        except DifferentDevicesError as error:
            raise AttemptRefusedError("update ranks {} and {}".format(*error.ranks), str(error)) from error

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers of this attempt, as the log records them."""
        return tuple(member_of(status) for _, status in sorted(self.workers.items()))

    @property
    def incarnations(self) -> set[str]:
        """The workers of this attempt."""
        return {status.incarnation for status in self.statuses.values()}

    def ended(self, record: Record) -> set[str]:
        """Return members in whose slot another process is now: they have closed or ended."""
        now = {status.slot: status.incarnation for status in self.statuses.values() if status.slot}
        return {m.incarnation for m in record.members if now.get(m.slot, m.incarnation) != m.incarnation}

    def members_after(self, record: Record, leases: Leases) -> tuple[Member, ...]:
        """Return the members of the log if this attempt commits.

        An update leaves out who was away, unless others of its replica are in. After a recovery the ones that were away
        may still have a lease on the same version.
        """
        if leases.lease_ns is None or self.asked.takeover:
            return self.members
        present, replicas = self.incarnations, {replica_of(status) for status in self.statuses.values()}
        recovers = self.asked.kind == "recover"
        kept = [
            member
            for member in record.members
            if member.incarnation not in present
            and (recovers or (member.worker not in self.workers and replica_of(member) in replicas))
        ]
        return (*self.members, *kept)

    def start_from(self, record: Record) -> Record:
        """Return the log's record at the start of this attempt: with `takeover`, that of the workers taken over."""
        if not self.asked.takeover:
            return record
        return taken_over(record, list(self.statuses.values()), self.members)

    def _refuse_speakers(self) -> None:
        """Refuse two ranks that speak for one worker, before faults: one has cut the other's connection to it."""
        speakers: dict[int, int] = {}
        for rank, entry in sorted(self.entered.items()):
            other = speakers.setdefault(entry.worker, rank) if entry.worker is not None else rank
            if other != rank:
                raise AttemptRefusedError(
                    f"update ranks {other} and {rank}",
                    f"both speak for worker {entry.worker}; give each a worker of its own, or none (worker=None)",
                )

    def _refuse_set(self, record: Record, leases: Leases) -> None:
        """Refuse too few replicas, and a set without a worker whose lease has no end.

        With `takeover` the caller says that nobody else serves.
        """
        for worker, status in self.workers.items():
            if not status.holds_slot:
                raise AttemptRefusedError(
                    f"worker {worker} (process {status.pid})",
                    f"process {status.before} was worker {worker} before, and has neither ended nor closed; end it",
                )
        if self.asked.takeover:
            return
        endless = [member for member in record.members if leases.is_endless(member.incarnation)]
        if leases.least is not None and self.asked.kind == "update":
            self._refuse_few(record, leases.least)
        missing = missing_members(record.members if leases.least is None else endless, self.workers)
        if missing:
            raise AttemptRefusedError(
                ", ".join(member.name for member in missing),
                f"the log has {len(record.members)} workers, {len(self.entered)} update ranks came, and none speaks "
                f"for {'this one' if len(missing) == 1 else 'these'}, which would go on with version {record.version}; "
                "start a rank beside each worker, or, once the others have ended, take over those that are left "
                "(takeover=True, --takeover)",
            )
        replaced = replaced_members(endless, self.workers)
        if replaced:
            raise AttemptRefusedError(
                ", ".join(member.name for member in replaced),
                "another worker is in its place, at another path or host, and whether this one has ended cannot be "
                f"known there; it may still serve version {record.version}; end it and take the set over "
                "(takeover=True, --takeover)",
            )

    def _refuse_few(self, record: Record, least: int) -> None:
        """Refuse fewer replicas than the policy asks for. A replica counts where all of its workers take part."""
        lacking = {replica_of(member) for member in record.members if member.worker not in self.workers}
        whole = {replica_of(status) for status in self.statuses.values()} - lacking
        if len(whole) >= least:
            return
        away = "".join(f"; worker {e.worker}: {e.away}" for _, e in sorted(self.entered.items()) if e.away)
        raise AttemptRefusedError(
            "the update ranks",
            f"an update needs {least} whole replicas (policy={least}), {len(whole)} can take part{away}; start the "
            "others, or allow fewer (policy=)",
        )

    def _refuse_logs(self, record: Record, where: str) -> None:
        foreign = {worker: status for worker, status in self.workers.items() if is_foreign(record, status.log)}
        if foreign and not self.asked.takeover:
            worker, status = next(iter(sorted(foreign.items())))
            raise AttemptRefusedError(
                f"workers {_listed(sorted(foreign))}",
                f"worker {worker} belongs to another log: {status.log} committed its version {status.version}, and "
                f"this one is {record.id}{f' in {where}' if where else ''}; use that log (ledger=, --ledger), or take "
                "the workers over (takeover=True, --takeover) if it is lost",
            )
        ahead = {worker: status for worker, status in self.workers.items() if is_outdated(record, status)}
        if ahead:  # with takeover, too: versions that were served would be committed a second time
            worker, status = next(iter(sorted(ahead.items())))
            raise AttemptRefusedError(
                f"workers {_listed(sorted(ahead))}",
                f"worker {worker} has version {status.version}, committed by attempt {status.content} of this log, and "
                f"the log{f' in {where}' if where else ''} ends with attempt {max(record.epochs, default=0)}: it is an "
                "older copy; use the newest one (ledger=, --ledger), or, if that is lost, take the workers over with "
                "an empty directory (takeover=True, --takeover)",
            )

    def refuse_strangers(self) -> None:
        """Raise AttemptRefusedError where a worker that settled is another process than the one at entry."""
        for rank, status in self.statuses.items():
            now = self.settled[rank].status
            if now is None or now.incarnation != status.incarnation:
                raise AttemptRefusedError(
                    f"worker {status.worker} (process {now.pid if now is not None else status.pid})",
                    f"it has taken the place of process {status.pid}",
                )

    def last_epoch(self) -> int:
        """Return the largest attempt number that any worker knows; this attempt's must be above it."""
        return max(status.epoch for status in self.statuses.values())

    @property
    def digests(self) -> dict[int, tuple[str, str]]:
        """The digests of each rank's layouts: (has, wants)."""
        return {rank: (entry.has, entry.wants) for rank, entry in self.entered.items()}

    def questions(self) -> dict[int, Describe]:
        """Return the question to each rank: of ranks with the same digest one is asked for the layout."""
        has: dict[str, int] = {}
        wants: dict[str, int] = {}
        for rank, entry in sorted(self.entered.items()):
            has.setdefault(entry.has, rank)
            wants.setdefault(entry.wants, rank)
        return {
            rank: Describe(self.epoch, has[entry.has] == rank, wants[entry.wants] == rank, self._group())
            for rank, entry in self.entered.items()
        }

    def catalogue(self) -> bytes:
        """Return the packed catalogue of all layouts, each once. Ranks that take no part have none, and any memory."""
        nobody = layout_digest(NO_LAYOUT)
        told = {nobody: NO_LAYOUT} if len(self.cast) <= max(self.cast) else {}
        free_bytes = dict.fromkeys(range(max(self.cast) + 1), MOST)
        for rank, report in self.said.items():
            entry, side = self.entered[rank], report.sides
            if side is None:
                raise AttemptRefusedError(f"update rank {rank}", "it does not tell its free memory and layouts")
            free_bytes[rank] = side.free_bytes
            if side.has is not None:
                told[entry.has] = side.has
            if side.wants is not None:
                told[entry.wants] = side.wants
        for rank, entry in sorted(self.entered.items()):
            if entry.has not in told or entry.wants not in told:
                raise AttemptRefusedError(f"update rank {rank}", "nobody sent the layout that it entered with")
        digests = self.digests
        has, wants = zip(*(digests.get(rank, (nobody, nobody)) for rank in free_bytes), strict=True)
        return list_layouts(told, has, wants, list(free_bytes.values()))

    def layouts(self, record: Record, catalogue: bytes | None) -> Layouts | None:
        """What moves to which workers; None where nothing has to."""
        statuses = self.statuses
        everyone = tuple(statuses)
        holds = tuple(r for r in everyone if self._serves(r))
        asked, version = self.asked, record.version
        if asked.kind == "recover":
            assert version is not None
            loads = tuple(r for r in everyone if r not in holds)
            if not loads:
                return None
            givers = tuple(r for r in holds if statuses[r].can_export) if asked.version == 0 else ()
            if asked.version == 0 and not givers:
                lost = f"every copy of version {version} is lost; all"
                mute = (
                    f"workers {self._listed(holds)} serve version {version} and their engines cannot hand it out; these"
                )
                raise AttemptRefusedError(
                    f"workers {self._listed(loads)}",
                    f"{mute if holds else lost} stay closed until the next update, or until "
                    f"recover(source, version={version}) is called with a source that still has it",
                )
            return Layouts(
                self.epoch,
                version,
                loads,
                self._numbers(loads),
                givers,
                None,
                self._group(),
                catalogue,
                self._who_is_away(record),
            )
        only, why = self._only(record, holds)
        whys = "; ".join(filter(None, (why, self._who_is_away(record))))
        return Layouts(
            self.epoch, asked.version, everyone, self._numbers(everyone), (), only, self._group(), catalogue, whys
        )

    def _serves(self, rank: int) -> bool:
        status = self.settled[rank].status
        return status is not None and status.state == "serving"

    def _numbers(self, ranks: Iterable[int]) -> tuple[int, ...]:
        statuses = self.statuses
        return tuple(statuses[rank].worker for rank in ranks)

    def _listed(self, ranks: Iterable[int]) -> str:
        """Return the numbers of these ranks' workers, for people."""
        return _listed(self._numbers(ranks))

    def _who_is_away(self, record: Record) -> str:
        """A note on the workers without which ranks go on."""
        away = {entry.worker: entry.away for _, entry in sorted(self.entered.items()) if entry.away}
        away |= {rank - self.callers: why for rank, why in sorted(self.left_out.items())}
        gone = [member.worker for member in record.members if member.worker not in self.workers]
        away |= {worker: "no update rank speaks for it" for worker in gone if worker not in away}
        over = ", and its lease is over" if self.asked.kind == "update" else ""
        return "; ".join(f"worker {worker} is left out{over}: {why}" for worker, why in away.items())

    def _group(self) -> int:
        """Return the attempt whose process group all ranks still have, or this one, which makes a new group."""
        had = {entry.group for entry in self.entered.values()}
        made, *where = self.grouped
        return made if had == {made} and where == [self.cast, self.device] else self.epoch

    def with_group(self) -> Attempt:
        """Return the attempt that knows of the process group that it uses."""
        return replace(self, grouped=(self._group(), self.cast, self.device))

    def _only(self, record: Record, holds: tuple[int, ...]) -> tuple[tuple[str, ...] | None, str]:
        """Return the tensors that move, None for all; and why all move where the caller asked for less."""
        asked = self.asked
        if asked.changed is None:
            return None, ""
        if asked.base is None or asked.base != record.version:
            return None, f"all tensors move: the changes are against version {asked.base}, {record.version} is served"
        if len(holds) < len(self.statuses):
            away = self._listed(r for r in self.statuses if r not in holds)
            return None, f"all tensors move: workers {away} do not hold version {record.version}"
        mute = [rank for rank, status in self.statuses.items() if not status.can_export]
        if mute:
            return None, f"all tensors move: the engines of workers {self._listed(mute)} take all or none"
        return asked.changed, ""

    def disagreement(self) -> str | None:
        """What differs between ranks that must not; None where all agree."""
        values = {report.value for report in self.said.values()}
        if len(values) > 1:
            told = ", ".join(f"rank {rank}: {report.value}" for rank, report in sorted(self.said.items()))
            return f"ranks made different plans ({told}); do all run the same code on the same layouts"
        return None

    def refuse_differing_weights(self) -> None:
        """Raise AttemptRefusedError where ranks that have the same pieces digested different elements."""
        told: dict[int, dict[str, list[int]]] = {}
        about: dict[int, str] = {}
        for rank, report in sorted(self.said.items()):
            for sample in report.samples:
                told.setdefault(sample.number, {}).setdefault(sample.digest, []).append(rank)
                about[sample.number] = sample.about
        for number, by_digest in sorted(told.items()):
            if len(by_digest) < 2:
                continue
            groups = sorted(by_digest.values(), key=len)
            most = groups.pop() if len(groups[-1]) > len(groups[-2]) else []
            odd = sorted(rank for ranks in groups for rank in ranks)
            agree = f"; update ranks {_listed(most)} have the same" if most else ""
            raise AttemptRefusedError(
                f"update ranks {_listed(odd)}",
                f"they hold different weights, all as version {self.asked.version}, in one or more of {about[number]}"
                f"{agree}; give all ranks the same weights (do they load one checkpoint, and take every step "
                "together?), or say of each piece on one rank only that it is there; compare_sources='all' finds every "
                "difference, and transfer='broadcast' names the tensors",
            )

    def fault(self, who: str, text: str) -> Fault:
        """A fault in the present phase."""
        return Fault(self.epoch, who, self.phase, -1, text)


def _listed(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers))


def _difference(entry: Enter, first: Enter, other: int) -> str:
    """Say in what an entry differs from that of rank `other`, and must not."""
    mine, theirs = first.asked, entry.asked
    if mine.takeover != theirs.takeover:
        return "takeover must be the same on all ranks"
    if mine.options != theirs.options:
        name = next(
            f.name for f in fields(mine.options) if getattr(mine.options, f.name) != getattr(theirs.options, f.name)
        )
        values = getattr(theirs.options, name), getattr(mine.options, name)
        return (
            f"its options have {name}={values[0]!r}, those of update rank {other} {name}={values[1]!r}; give all "
            "ranks the same options"
        )
    return (
        f"it enters with {theirs.kind} of version {theirs.version}, update rank {other} with {mine.kind} of "
        f"version {mine.version}; all ranks must ask for the same"
    )
