"""Orders of issue on shared communicators: what each rank issues, and a machine that runs it to its end.

Both were written from "Shared communicators" of docs/reference/semantics.md alone, and share no code with the verifier.
`issue_ranks.py` runs the same scripts on real processes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from tests.support.brute_force import Compute, Machine, Receive, Send
from treadle.ir import Action, Schedule
from treadle.ir.action import Kind

Layout: TypeAlias = Literal["channel", "direction", "pair", "group"]
Creation: TypeAlias = Literal["before", "lazy", "lazy-device"]
Key: TypeAlias = tuple[str, int, int]
"""A communicator."""


class Message(NamedTuple):
    """A send or a receive: its name is the data that moves."""

    is_send: bool
    peer: int
    name: Action
    communicator: Key


@dataclass(frozen=True)
class Unit:
    """What a host issues at once: a batch of messages, a cell, or a wait.

    `needs` are numbers of units of this rank that must have ended, of which None is one that nothing provides.
    """

    messages: tuple[Message, ...] = ()
    needs: tuple[int | None, ...] = ()

    @property
    def on_compute_stream(self) -> bool:
        return not self.messages

    @property
    def communicators(self) -> tuple[Key, ...]:
        return tuple(dict.fromkeys(message.communicator for message in self.messages))


Script: TypeAlias = tuple[Unit, ...]


@dataclass(frozen=True)
class Plan:
    """A script for each rank."""

    scripts: tuple[Script, ...]

    @property
    def members(self) -> dict[Key, list[int]]:
        """The ranks that issue anything on each communicator."""
        found: dict[Key, dict[int, None]] = defaultdict(dict)
        for rank, script in enumerate(self.scripts):
            for unit in script:
                for key in unit.communicators:
                    found[key][rank] = None
        return {key: list(ranks) for key, ranks in found.items()}

    def numbers(self, src: int, dst: int) -> dict[Key, tuple[int, int]]:
        """How many sends from `src` to `dst` and receives of them each communicator has."""
        counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
        for rank, peer, sends in ((src, dst, True), (dst, src, False)):
            for unit in self.scripts[rank]:
                for message in unit.messages:
                    if message.is_send == sends and message.peer == peer:
                        counts[message.communicator][not sends] += 1
        return {key: (sent, received) for key, (sent, received) in counts.items()}

    @property
    def num_alone(self) -> int:
        """Messages without a partner."""
        ranks = range(len(self.scripts))
        numbers = (self.numbers(src, dst) for src in ranks for dst in ranks if src != dst)
        return sum(abs(sent - received) for found in numbers for sent, received in found.values())


def plan_of(schedule: Schedule, layout: Layout) -> Plan:
    """Give every message its communicator and every cell the receives that it reads."""
    machine = Machine(schedule, None, "sender")
    return Plan(tuple(_script(machine, schedule, rank, layout) for rank in range(schedule.pp)))


def _script(machine: Machine, schedule: Schedule, rank: int, layout: Layout) -> Script:
    cells = iter(machine.compute[rank])
    sends = {peer: list(link.sends) for (src, peer), link in machine.links.items() if src == rank}
    receives: dict[int, Iterator[Send | Receive]] = {
        peer: iter(link.receives) for (peer, dst), link in machine.links.items() if dst == rank
    }
    next_send: dict[int, Iterator[Send | Receive]] = {peer: iter(ops) for peer, ops in sends.items()}
    unit_of: dict[int, int] = {}
    units: list[Unit] = []
    for turn in schedule.issue[rank]:
        if turn.verb == ".":
            units.append(Unit(needs=tuple(_reads(next(cells), unit_of))))
        elif turn.verb == "wait>":
            units.append(Unit(needs=(unit_of[id(sends[turn.peer][turn.place])],)))
        else:
            ops: dict[int, Iterator[Send | Receive]] = next_send if turn.verb == ">" else receives
            op = next(ops[turn.peer])
            src, dst = (rank, turn.peer) if turn.verb == ">" else (turn.peer, rank)
            message = Message(turn.verb == ">", turn.peer, op.what, _communicator(layout, src, dst, op.what))
            if turn.joined:
                units[-1] = Unit((*units[-1].messages, message))
            else:
                units.append(Unit((message,)))
            unit_of[id(op)] = len(units) - 1
    return tuple(units)


def _reads(cell: Compute, unit_of: dict[int, int]) -> Iterator[int | None]:
    for need in cell.needs:
        if need is None:
            yield None
        elif isinstance(need, Receive):
            yield unit_of[id(need)]


def _communicator(layout: Layout, src: int, dst: int, name: Action) -> Key:
    if layout == "channel":
        return layout, src, dst
    if layout == "direction":
        return layout, int(name.kind == Kind.F), 0
    if layout == "pair":
        return layout, min(src, dst), max(src, dst)
    return layout, 0, 0


@dataclass(frozen=True)
class Fate:
    """What became of a step: units that never ended, and receives that got another message, as (rank, name, got)."""

    num_left: int
    crossed: frozenset[tuple[int, Action, Action]]

    @property
    def hangs(self) -> bool:
        return self.num_left > 0


COMPUTE: Key = ("compute", 0, 0)


@dataclass
class _Rank:
    """How far a rank has come. `streams` has what was issued and has not ended, a compute stream among them."""

    script: Script
    issued: int = 0
    compute_before: dict[int, int] = field(default_factory=dict)
    """For each batch the last cell or wait that was issued before it."""
    last_compute: int | None = None
    arrived: dict[Key, None] = field(default_factory=dict)
    streams: dict[Key, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def issue(self) -> None:
        """Put the next unit on its streams."""
        number, unit = self.issued, self.script[self.issued]
        self.issued += 1
        for stream in unit.communicators or (COMPUTE,):
            self.streams[stream].append(number)
        if unit.on_compute_stream:
            self.last_compute = number
        elif self.last_compute is not None:
            self.compute_before[number] = self.last_compute

    def heads(self) -> set[int]:
        """What is first on a stream."""
        return {stream[0] for stream in self.streams.values() if stream}

    def can_start(self, number: int) -> bool:
        """Is it first on all of its streams, and has all that it waits for ended?"""
        unit = self.script[number]
        if any(self.streams[stream][0] != number for stream in unit.communicators):
            return False
        needs = [*unit.needs, *([self.compute_before[number]] if number in self.compute_before else [])]
        return all(need is not None and need in self.ended for need in needs)

    def end(self, number: int) -> None:
        """Make way for what is next on its streams."""
        self.ended.add(number)
        for stream in self.script[number].communicators or (COMPUTE,):
            self.streams[stream].popleft()


def run_plan(plan: Plan, *, eager: bool, creation: Creation = "before") -> Fate:
    """Let whatever can go go, until nothing can."""
    return _Machine(plan, eager=eager, creation=creation).run()


class _Machine:
    def __init__(self, plan: Plan, *, eager: bool, creation: Creation) -> None:
        self.plan, self.eager, self.creation = plan, eager, creation
        self.ranks = [_Rank(script) for script in plan.scripts]
        self.members = plan.members
        self.partner = dict(self._matched())

    def _matched(self) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """(rank, unit, which of its messages) -> those of the message it meets, both ways."""
        lines: dict[tuple[Key, int, int], tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]]
        lines = defaultdict(lambda: ([], []))
        for rank, script in enumerate(self.plan.scripts):
            for number, unit in enumerate(script):
                for at, (is_send, peer, _, key) in enumerate(unit.messages):
                    src, dst = (rank, peer) if is_send else (peer, rank)
                    lines[key, src, dst][not is_send].append((rank, number, at))
        for sends, receives in lines.values():
            for send, receive in zip(sends, receives, strict=False):
                yield send, receive
                yield receive, send

    def run(self) -> Fate:
        moved = True
        while moved:
            moved = False
            for number in range(len(self.ranks)):
                moved |= self._advance(number)
        left = sum(len(rank.script) - len(rank.ended) for rank in self.ranks)
        return Fate(left, frozenset(self._crossed()))

    def _advance(self, number: int) -> bool:
        """Let a rank issue, start and end what it can, once each; did anything move?"""
        rank = self.ranks[number]
        moved = self._issue(rank)
        for unit in rank.heads():
            if unit not in rank.started and rank.can_start(unit):
                rank.started.add(unit)
                moved = True
            if unit in rank.started and self._can_end(number, unit):
                rank.end(unit)
                moved = True
        return moved

    def _issue(self, rank: _Rank) -> bool:
        before = rank.issued, len(rank.arrived)
        while rank.issued < len(rank.script) and self._made(rank, rank.script[rank.issued]):
            rank.issue()
        return (rank.issued, len(rank.arrived)) != before

    def _made(self, rank: _Rank, unit: Unit) -> bool:
        """Are the communicators of this unit there, as far as its host can have come?"""
        for key in unit.communicators if self.creation != "before" else ():
            if key not in rank.arrived:
                if self.creation == "lazy-device" and len(rank.ended) < rank.issued:
                    return False
                rank.arrived[key] = None
            if not all(key in self.ranks[member].arrived for member in self.members[key]):
                return False
        return True

    def _can_end(self, number: int, unit: int) -> bool:
        for at, message in enumerate(self.ranks[number].script[unit].messages):
            partner = self.partner.get((number, unit, at))
            if partner is None:
                return False
            waits = not (message.is_send and self.eager)
            if waits and partner[1] not in self.ranks[partner[0]].started:
                return False
        return True

    def _crossed(self) -> Iterator[tuple[int, Action, Action]]:
        for number, rank in enumerate(self.ranks):
            for unit in rank.ended:
                for at, message in enumerate(rank.script[unit].messages):
                    if not message.is_send:
                        src, its, place = self.partner[number, unit, at]
                        got = self.ranks[src].script[its].messages[place].name
                        if got != message.name:
                            yield number, message.name, got
