"""Judges a log: which uses of a storage nothing orders, and which memory is given away while a stream still uses it.

Each stream has a vector clock: for every stream, how much of it is known to be done. A use is ordered behind another if
the clock of its stream says so. That comes from three things: the stream's own order, waits for events, and the
launching thread, which orders what it did itself before a launch. With `host_orders` it also orders what it has waited
for; without, no order may come from that, so the log of a run that happened to wait is judged as if it had not.

The allocator gives a storage back to the stream it came from when Python lets go of it. Uses on other streams which
that stream is not behind, and which no recorded stream covers, stay with the memory: whoever gets it next and writes it
must be behind them. With `strict` such a free is a finding by itself, also if nothing was allocated behind it.

A pure function of the log, so a log with waits left out shows what they are good for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle.runtime.checker.log import HOST, Allocate, Entry, EventRecord, Free, HostWait, Keep, LaunchSite, Use, Wait
from treadle.runtime.checker.stream_findings import FindingKind, StreamFinding
from treadle.runtime.checker.stream_recorder import OUTSIDE


class _Done(NamedTuple):
    """A use in the past: the `tick`-th of its stream."""

    stream: int
    tick: int
    kernel: str
    where: LaunchSite


class _Ghost(NamedTuple):
    """A use of memory that was given back under it."""

    use: _Done
    made: Allocate
    freed: LaunchSite


@dataclass
class _Storage:
    made: Allocate
    write: _Done | None = None
    reads: dict[int, _Done] = field(default_factory=dict)
    uses: dict[int, _Done] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    ghosts: tuple[_Ghost, ...] = ()


class _Judge:
    """The state of a judgement at one place of the log."""

    def __init__(self, streams: Sequence[str], *, host_orders: bool, strict: bool) -> None:
        self.names, self.host_orders, self.strict = streams, host_orders, strict
        self.clocks = [[0] * len(streams) for _ in streams]
        self.events: dict[int, list[int]] = {}
        self.storages: dict[int, _Storage] = {}
        self.given_back: list[list[_Ghost]] = [[] for _ in streams]
        self.found: dict[tuple[object, ...], StreamFinding] = {}

    def use(self, entry: Use) -> None:
        clock = self._launch(entry.stream)
        clock[entry.stream] += 1
        now = _Done(entry.stream, clock[entry.stream], entry.kernel, entry.where)
        for number in entry.reads:
            storage = self.storages.get(number)
            if storage is None:
                continue
            self._behind(FindingKind.READ_TOO_EARLY, storage, storage.write, now, clock)
            storage.reads[entry.stream] = storage.uses[entry.stream] = now
        for number in entry.writes:
            storage = self.storages.get(number)
            if storage is None:
                continue
            self._behind(FindingKind.WRITTEN_TWICE, storage, storage.write, now, clock)
            for read in storage.reads.values():
                self._behind(FindingKind.WRITTEN_TOO_EARLY, storage, read, now, clock)
            for ghost in storage.ghosts:
                if clock[ghost.use.stream] < ghost.use.tick:
                    self._tell(FindingKind.REUSED, ghost.made, ghost.use, now, ghost.freed)
            storage.ghosts, storage.write, storage.reads = (), now, {}
            storage.uses[entry.stream] = now

    def allocate(self, entry: Allocate) -> None:
        storage = self.storages[entry.storage] = _Storage(entry)
        left = self.given_back[entry.stream]
        if left:
            clock = self._launch(entry.stream)
            left[:] = [ghost for ghost in left if clock[ghost.use.stream] < ghost.use.tick]
            storage.ghosts = tuple(left)

    def free(self, entry: Free) -> None:
        storage = self.storages.pop(entry.storage, None)
        if storage is None or storage.made.stream == HOST:  # the pinned allocator waits for the copies itself
            return
        home = storage.made.stream
        for use in storage.uses.values():
            if use.stream == home or self.clocks[home][use.stream] >= use.tick:
                continue
            if any(self.clocks[kept][use.stream] >= use.tick for kept in storage.kept):
                continue
            self.given_back[home].append(_Ghost(use, storage.made, entry.where))
            if self.strict and entry.where.op != OUTSIDE:
                self._tell(FindingKind.NOT_KEPT, storage.made, use, None, entry.where)
        self.given_back[home] += [g for g in storage.ghosts if g not in self.given_back[home]]  # it was never written

    def record(self, entry: EventRecord) -> None:
        self.events[entry.event] = list(self._launch(entry.stream))

    def wait(self, entry: Wait) -> None:
        known = self.events.get(entry.event)
        if known is not None:
            _join(self.clocks[entry.stream], known)

    def host_wait(self, entry: HostWait) -> None:
        known = self.clocks[entry.stream] if entry.stream is not None else self.events.get(entry.event or 0)
        if known is not None:
            _join(self.clocks[HOST], known)

    def keep(self, entry: Keep) -> None:
        storage = self.storages.get(entry.storage)
        if storage is not None:
            storage.kept.add(entry.stream)

    def _launch(self, stream: int) -> list[int]:
        """Returns the stream's clock, behind what the host did before this launch."""
        clock, host = self.clocks[stream], self.clocks[HOST]
        if self.host_orders:
            _join(clock, host)
        elif clock[HOST] < host[HOST]:
            clock[HOST] = host[HOST]
        return clock

    def _behind(
        self, kind: FindingKind, storage: _Storage, earlier: _Done | None, now: _Done, clock: list[int]
    ) -> None:
        if earlier is not None and clock[earlier.stream] < earlier.tick:
            self._tell(kind, storage.made, earlier, now, None)

    def _tell(self, kind: FindingKind, made: Allocate, use: _Done, now: _Done | None, freed: LaunchSite | None) -> None:
        key = (
            kind,
            made.where.line,
            use.kernel,
            use.where.line,
            now and (now.kernel, now.where.line),
            freed and freed.line,
        )
        known = self.found.get(key)
        if known is not None:
            known.times += 1
            return
        self.found[key] = StreamFinding(
            kind,
            tensor=f"tensor {made.told}, made on {self.names[made.stream]} {made.where}",
            first=f"{use.kernel} on {self.names[use.stream]} {use.where}",
            second=f"{now.kernel} on {self.names[now.stream]} {now.where}" if now is not None else "",
            freed=str(freed) if freed is not None else "",
        )


def _join(into: list[int], other: list[int]) -> None:
    for stream, tick in enumerate(other):
        if tick > into[stream]:
            into[stream] = tick


def analyse(
    log: Sequence[Entry],
    streams: Sequence[str],
    *,
    host_orders: bool = False,
    strict: bool = True,
    without: Collection[int] = frozenset(),
    only_first: bool = False,
) -> list[StreamFinding]:
    """Returns what nothing orders, each place once.

    Args:
        log: what a run noted.
        streams: their names.
        host_orders: does what the launching thread has waited for order what it launches afterwards.
        strict: is memory that is given back under a use a finding, even if nothing gets it later.
        without: places of the log that are left out.
        only_first: stop at the first finding.

    Returns:
        The findings.

    """
    judge = _Judge(streams, host_orders=host_orders, strict=strict)
    for place, entry in enumerate(log):
        if place in without:
            continue
        match entry:
            case Use():
                judge.use(entry)
            case Allocate():
                judge.allocate(entry)
            case Free():
                judge.free(entry)
            case EventRecord():
                judge.record(entry)
            case Wait():
                judge.wait(entry)
            case HostWait():
                judge.host_wait(entry)
            case Keep():
                judge.keep(entry)
        if only_first and judge.found:
            break
    return list(judge.found.values())
