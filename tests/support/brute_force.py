"""A brute-force executor of schedules: the oracle that tests hold the verifier against.

It was written from "Schedules" of docs/reference/semantics.md alone. It takes the data types of
`treadle.ir` and nothing else, and restates the dependency rule, so as to share no mistake with what it checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeVar

from treadle.ir import Action, Kind, Pair, Placement, Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of an execution."""

    symptoms: frozenset[str]
    peak: tuple[int, ...]
    stuck: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.symptoms


@dataclass(eq=False, slots=True)
class Op:
    """One thing a lane does. A need that is None is one that nothing provides."""

    where: str
    what: Action | Pair
    needs: list[Op | None] = field(default_factory=list)
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.where} {self.what}"

    def can_start(self) -> bool:
        return all(need is not None and need.ended for need in self.needs)


@dataclass(eq=False, slots=True)
class Compute(Op):
    """A cell, with the receives it reads and what each should hold."""

    reads: list[tuple[Action, Receive]] = field(default_factory=list)

    def reads_wrong_data(self) -> bool:
        return any(receive.got != label for label, receive in self.reads)


@dataclass(eq=False, slots=True)
class Send(Op):
    """A message is its own name: that is the data that moves."""

    what: Action


@dataclass(eq=False, slots=True)
class Receive(Op):
    """Stores what it got under its own name."""

    what: Action
    got: Action | None = None
    reader: Op | None = None


@dataclass(eq=False, slots=True)
class Link:
    """A channel: the lane of its sends, the lane of its receives, and what is under way (eager only)."""

    sends: deque[Send]
    receives: deque[Receive]
    wire: deque[Action] = field(default_factory=deque)


class Need(NamedTuple):
    """A line of the dependency rule: any of these kinds, of this micro-batch, on this rank and chunk."""

    kinds: tuple[Kind, ...]
    mb: int
    rank: int
    chunk: int


class Pipes:
    """The dependency rule on a placement."""

    def __init__(self, placement: Placement) -> None:
        self._stages = placement.stages
        self._pipe_of = placement.pipes
        self._holder = {
            (placement.pipes[chunk], stage): (rank, chunk)
            for rank, stages in enumerate(placement.stages)
            for chunk, stage in enumerate(stages)
        }

    def _beside(self, rank: int, chunk: int, step: int) -> tuple[int, int] | None:
        return self._holder.get((self._pipe_of[chunk], self._stages[rank][chunk] + step))

    def needs(self, rank: int, action: Action) -> Iterator[Need]:
        kind, mb, chunk = action
        if kind == Kind.W:
            yield Need((Kind.I,), mb, rank, chunk)
            return
        if kind in (Kind.B, Kind.I):
            yield Need((Kind.F,), mb, rank, chunk)
        made_by = (Kind.F,) if kind == Kind.F else (Kind.B, Kind.I)
        origin = self._beside(rank, chunk, -1 if kind == Kind.F else +1)
        if origin is not None:
            yield Need(made_by, mb, *origin)

    def message(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """The rank that gets what this action makes, and its name; None if no other rank needs it."""
        if action.kind == Kind.W:
            return None
        reader = self._beside(rank, action.chunk, +1 if action.kind == Kind.F else -1)
        if reader is None or reader[0] == rank:
            return None
        return reader[0], _label(action, reader[1])


class Machine:
    """A schedule as ops on lanes."""

    def __init__(self, schedule: Schedule, ring: int | None, receives: str) -> None:
        self._schedule = schedule
        self._pipes = Pipes(schedule.placement)
        self._rows: list[list[tuple[Action, Compute]]] = []
        self._sends: dict[tuple[int, int], list[Send]] = defaultdict(list)
        self._reads: dict[tuple[int, int], list[tuple[Action, Compute]]] = defaultdict(list)
        self.wrong_data = False
        self.compute = [self._fill_row(rank, row) for rank, row in enumerate(schedule.rows)]
        for rank in range(len(schedule.rows)):
            self._fill_needs(rank)
        channels = self._sends.keys() | self._reads.keys() | schedule.receives.keys()
        self.links = {channel: self._link(channel, ring, receives) for channel in sorted(channels)}

    def _fill_row(self, rank: int, row: tuple[Action | Pair, ...]) -> deque[Compute]:
        """The compute lane of a rank, and the sends of its actions."""
        lane: deque[Compute] = deque()
        known: list[tuple[Action, Compute]] = []
        for cell in row:
            op = Compute(f"rank {rank}:", cell)
            lane.append(op)
            for action in cell.actions:
                if _is_known(self._schedule, action):
                    known.append((action, op))
                    self._send(rank, action, op)
        self._rows.append(known)
        return lane

    def _send(self, rank: int, action: Action, op: Compute) -> None:
        made = self._pipes.message(rank, action)
        if made is not None:
            to, name = made
            self._sends[rank, to].append(Send(f"{rank}->{to}: send", name, [op]))

    def _fill_needs(self, rank: int) -> None:
        row = self._rows[rank]
        first: dict[Action, tuple[int, Compute]] = {}
        for position, (action, op) in enumerate(row):
            first.setdefault(action, (position, op))
        for action, op in row:
            for need in self._pipes.needs(rank, action):
                if need.rank == rank:
                    fills = [Action(kind, need.mb, need.chunk) for kind in need.kinds]
                    found = [first[fill] for fill in fills if fill in first]
                    op.needs.append(min(found, key=lambda it: it[0])[1] if found else None)
                else:
                    self._reads[need.rank, rank].append((_label(action, action.chunk), op))

    def _link(self, channel: tuple[int, int], ring: int | None, order: str) -> Link:
        source, to = channel
        sends, reads = self._sends.get(channel, []), self._reads.get(channel, [])
        labels = self._receive_order(channel, sends, [label for label, _ in reads], order)
        receives = [Receive(f"{source}->{to}: receive", label) for label in labels]
        _connect_readers(receives, reads)
        if ring is not None:
            _limit_buffers(receives, ring)
        return Link(deque(sends), deque(receives))

    def _receive_order(
        self, channel: tuple[int, int], sends: list[Send], used: list[Action], order: str
    ) -> list[Action]:
        if channel in self._schedule.receives:
            return list(self._schedule.receives[channel])
        if order == "use":
            return used
        place = {key: k for k, key in enumerate(_numbered(send.what for send in sends))}
        # sorted() is stable: those never sent stay in the order of their actions
        return [label for label, _ in sorted(_numbered(used), key=lambda key: place.get(key, len(sends)))]

    def run(self, eager: bool) -> None:
        """Sweeps over the lanes until a whole sweep moves nothing."""
        moved = True
        while moved:
            moved = False
            for lane in self.compute:
                moved |= self._advance_compute(lane)
            for link in self.links.values():
                moved |= self._advance_eager(link) if eager else self._advance_matched(link)

    def _advance_compute(self, lane: deque[Compute]) -> bool:
        moved = False
        while lane and lane[0].can_start():
            op = lane.popleft()
            self.wrong_data |= op.reads_wrong_data()
            op.ended = moved = True
        return moved

    def _advance_matched(self, link: Link) -> bool:
        moved = False
        while link.sends and link.receives and link.sends[0].can_start() and link.receives[0].can_start():
            send = link.sends.popleft()
            send.ended = moved = True
            self._deliver(send.what, link.receives.popleft())
        return moved

    def _advance_eager(self, link: Link) -> bool:
        moved = False
        while link.sends and link.sends[0].can_start():
            send = link.sends.popleft()
            link.wire.append(send.what)
            send.ended = moved = True
        while link.wire and link.receives and link.receives[0].can_start():
            self._deliver(link.wire.popleft(), link.receives.popleft())
            moved = True
        return moved

    def _deliver(self, message: Action, receive: Receive) -> None:
        receive.got = message
        receive.ended = True
        self.wrong_data |= message != receive.what

    def stuck(self) -> Iterator[str]:
        """What is left in the queues; for eager sends also what nobody received."""
        for lane in self.compute:
            yield from map(str, lane)
        for (source, to), link in self.links.items():
            yield from map(str, link.sends)
            yield from (f"{source}->{to}: message {message}" for message in link.wire)
            yield from map(str, link.receives)


def execute(schedule: Schedule, *, eager: bool = False, ring: int | None = None, receives: str = "sender") -> Outcome:
    """Runs a schedule to its end, or to where it can do no more.

    `receives` is the order of the receives of channels for which the schedule gives none: "sender", or "use"
    for the order of the actions that read them.
    """
    if receives not in ("sender", "use"):
        raise ValueError(f"receives are in the order of 'sender' or 'use', got {receives!r}")
    machine = Machine(schedule, ring, receives)
    machine.run(eager)
    stuck = tuple(machine.stuck())
    symptoms = set(_miscounted(schedule))
    if stuck:
        symptoms.add("hang")
    if machine.wrong_data:
        symptoms.add("wrong data")
    return Outcome(frozenset(symptoms), tuple(_peak(row) for row in schedule.rows), stuck)


def _is_known(schedule: Schedule, action: Action) -> bool:
    microbatches = schedule.num_microbatches // len(set(schedule.placement.pipes))
    return 0 <= action.mb < microbatches and 0 <= action.chunk < len(schedule.placement.pipes)


def _label(action: Action, reader_chunk: int) -> Action:
    """The name of the message that an action makes or reads: a gradient is B, also for I."""
    return Action(Kind.F if action.kind == Kind.F else Kind.B, action.mb, reader_chunk)


def _numbered(items: Iterable[T]) -> Iterator[tuple[T, int]]:
    """Each item with how many like it came before: the j of "the j-th of a name"."""
    seen: Counter[T] = Counter()
    for item in items:
        yield item, seen[item]
        seen[item] += 1


def _connect_readers(receives: list[Receive], reads: list[tuple[Action, Compute]]) -> None:
    jth = dict(zip(_numbered(receive.what for receive in receives), receives, strict=True))
    for key, (label, op) in zip(_numbered(label for label, _ in reads), reads, strict=True):
        receive = jth.get(key)
        op.needs.append(receive)
        if receive is not None:
            op.reads.append((label, receive))
            receive.reader = op


def _limit_buffers(receives: list[Receive], ring: int) -> None:
    for earlier, later in zip(receives, receives[ring:], strict=False):
        if earlier.reader is not None:
            later.needs.append(earlier.reader)


def _miscounted(schedule: Schedule) -> Iterator[str]:
    microbatches = schedule.num_microbatches // len(set(schedule.placement.pipes))
    for row in schedule.rows:
        counts = Counter(action for cell in row for action in cell.actions)
        if not all(_is_known(schedule, action) for action in counts):
            yield "unknown"
        for mb, chunk in product(range(microbatches), range(len(schedule.placement.pipes))):
            f, b, i, w = (counts[Action(kind, mb, chunk)] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if not f or not (b or (i and w)):
                yield "missing"
            if max(f, b, i, w) > 1 or (b and (i or w)):
                yield "double"


def _peak(row: tuple[Action | Pair, ...]) -> int:
    held: set[tuple[int, int]] = set()
    peak = 0
    for cell in row:
        held |= {(action.mb, action.chunk) for action in cell.actions if action.kind == Kind.F}
        peak = max(peak, len(held))
        held -= {(action.mb, action.chunk) for action in cell.actions if action.kind in (Kind.B, Kind.W)}
    return peak
