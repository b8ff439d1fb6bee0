"""The coordinator's decisions, phase by phase.

`hear` takes a rank's message. When all ranks have entered, the log must number the attempt (`Open`, answered through
`opened`); when all have voted, the log must write the decision (`Decide`, answered through `decided`). A log that
cannot be written ends the attempt (`stop`). There is no time here: the caller knows the deadlines and calls `stop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from treadle.update.protocol.attempt import Attempt, AttemptRefusedError
from treadle.update.protocol.control import (
    Agreed,
    Enter,
    Fault,
    Go,
    Join,
    Layouts,
    Phase,
    Proceed,
    Settled,
    Sides,
    Stop,
    ToCoordinator,
)
from treadle.update.protocol.record import Member, Record
from treadle.wire.errors import WireError

_AFTER: dict[Phase, Phase] = {"plan": "begin", "begin": "finish", "finish": "open", "open": "enter"}


@dataclass(frozen=True)
class Tell:
    """Send a message to one rank, or to all (-1)."""

    message: Any
    rank: int = -1


@dataclass(frozen=True)
class Open:
    """Write `record` to the log, then number an attempt above `least`."""

    least: int
    record: Record
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Decide:
    """Point of no return: write that this version is committed. Ranks are told only after that."""

    version: int


Action: TypeAlias = Tell | Open | Decide


@dataclass(frozen=True)
class CoordinatorState:
    """What the coordinator knows.

    `lost`: names of ranks whose connection ended. `known`: digests of the layouts of which all ranks have made plans.
    `where` is the log's directory, for errors.
    """

    world: int
    attempt: Attempt
    where: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)
    sides: dict[int, Sides] = field(default_factory=dict)
    known: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not reported in this phase."""
        spoken = self.attempt.spoken(self.sides)
        return [rank for rank in range(self.world) if rank not in spoken]

    @property
    def num_spoken(self) -> int:
        """How many ranks have reported in this phase."""
        return len(self.attempt.spoken(self.sides))


Step: TypeAlias = tuple[CoordinatorState, list[Action]]


def hear(state: CoordinatorState, rank: int, message: ToCoordinator, record: Record) -> Step:
    """Take a rank's message; `record` is the log's."""
    attempt, before = state.attempt, list[Action]()
    if isinstance(message, Enter):
        if state.lost:
            gone = ", ".join(state.lost.values())
            fault = Fault(0, gone, "enter", -1, "lost in an earlier attempt; start the update ranks again")
            return state, [Tell(Stop(0, fault, committed=False), rank)]
        if attempt.phase != "enter":  # the rank has given the attempt up
            text = "has given up, and begins another attempt"
            state, before = stop(state, attempt.fault(f"update rank {rank}", text))
            attempt = state.attempt
        attempt = replace(attempt, entered={**attempt.entered, rank: message})
    elif isinstance(message, Fault) and not message.epoch:
        return _leave(state, rank, message)
    elif isinstance(message, Join) or message.epoch != attempt.epoch or not attempt.epoch:
        return state, []  # the message belongs to an attempt that is over
    elif isinstance(message, Fault):
        return stop(state, message)
    elif isinstance(message, Settled) and attempt.phase == "settle":
        attempt = replace(attempt, settled={**attempt.settled, rank: message})
    elif isinstance(message, Sides) and attempt.phase == "layout":
        state = replace(state, sides={**state.sides, rank: message})
    elif isinstance(message, Agreed) and message.phase == attempt.phase:
        attempt = replace(attempt, agreed={**attempt.agreed, rank: message})
    state = replace(state, attempt=attempt)
    if state.num_spoken < state.world:
        return state, before
    try:
        state, actions = _advance(state, record)
    except AttemptRefusedError as refusal:
        state, actions = stop(state, attempt.fault(refusal.who, str(refusal)))
    except WireError as error:
        state, actions = stop(state, fault_of_log(state, error))
    return state, [*before, *actions]


def malformed(state: CoordinatorState, rank: int, who: str, text: str, record: Record) -> Step:
    """End the attempt of a rank that sent something unreadable.

    Where ranks enter, it counts as that rank's entry: a Stop would not reach the ranks that have not begun yet.
    """
    fault = state.attempt.fault(who, text)
    if state.attempt.phase != "enter":
        return stop(state, fault)
    return hear(state, rank, Enter(rank, None, "update", 0, None, None, "", "", None, False, 0, fault), record)


def _leave(state: CoordinatorState, rank: int, fault: Fault) -> Step:
    """A rank that has not heard Go cannot take part any more: all hear of it once all have entered."""
    attempt = state.attempt
    if attempt.phase != "enter":  # Go is on its way
        return stop(state, msgspec.structs.replace(fault, epoch=attempt.epoch))
    if rank not in attempt.entered:
        return state, []  # the attempt is over
    entry = msgspec.structs.replace(attempt.entered[rank], fault=fault)
    return replace(state, attempt=replace(attempt, entered={**attempt.entered, rank: entry})), []


def opened(state: CoordinatorState, epoch: int, record: Record) -> Step:
    """Return the log has numbered the attempt."""
    attempt = state.attempt
    left = tuple(member.worker for member in attempt.left if member.worker not in attempt.workers)
    state = replace(state, attempt=replace(attempt, epoch=epoch, phase="settle"))
    told = record.version, record.epochs, record.id, record.took
    return state, [Tell(Go(epoch, *told, attempt.first.takeover, left))]


def decided(state: CoordinatorState) -> Step:
    """Return the decision is on disk: tell the ranks."""
    attempt = replace(state.attempt, committed=True)
    return _proceed(replace(state, attempt=attempt))


def stop(state: CoordinatorState, fault: Fault) -> Step:
    """End the attempt on all ranks."""
    told = Stop(state.attempt.epoch, fault, state.attempt.committed)
    return replace(state, attempt=Attempt(state.world), sides={}), [Tell(told)]


def joined(state: CoordinatorState, rank: int) -> CoordinatorState:
    """A rank has joined. A new rank knows no layouts, so all are told again."""
    return replace(state, lost={r: name for r, name in state.lost.items() if r != rank}, known={})


def lost(state: CoordinatorState, rank: int, name: str, text: str) -> Step:
    """A rank's connection has ended. That ends the attempt, if there is one."""
    state = replace(state, lost={**state.lost, rank: name})
    if not state.attempt.entered:
        return state, []
    return stop(state, state.attempt.fault(name, f"lost: {text}"))


def fault_of_log(state: CoordinatorState, error: Exception) -> Fault:
    """Return the fault of a coordinator that cannot write its log."""
    return state.attempt.fault("the coordinator (update rank 0)", f"{type(error).__name__}: {error}")


def _advance(state: CoordinatorState, record: Record) -> Step:
    """All ranks have reported in this phase: go on to the next."""
    attempt = state.attempt
    if attempt.phase == "enter":
        attempt.refuse_entries(record, state.where)
        state = replace(state, attempt=replace(attempt, left=tuple(attempt.leaving(record))))
        return state, [Open(attempt.last_epoch(), attempt.start_from(record), attempt.members)]
    if attempt.phase == "settle":
        attempt.refuse_strangers()
        if attempt.digests == state.known:
            return _lay_out(state, record, None)
        state = replace(state, attempt=replace(attempt, phase="layout"), sides={})
        return state, [Tell(send, rank) for rank, send in attempt.sends().items()]
    if attempt.phase == "layout":
        state, actions = _lay_out(state, record, attempt.catalogue(state.sides))
        return replace(state, sides={}), actions
    return _agree(state, record)


def _lay_out(state: CoordinatorState, record: Record, catalogue: bytes | None) -> Step:
    attempt = state.attempt
    layouts: Layouts | None = attempt.layouts(record, catalogue)
    if layouts is None:
        return replace(state, attempt=Attempt(state.world)), [Tell(Proceed(attempt.epoch, "open"))]
    known = state.known if catalogue is None else {}  # until all ranks have made their plans of it
    return replace(state, attempt=replace(attempt, phase="plan"), known=known), [Tell(layouts)]


def _agree(state: CoordinatorState, record: Record) -> Step:
    attempt = state.attempt
    different = attempt.disagreement()
    if different is not None:
        raise AttemptRefusedError("the update ranks", different)
    attempt.refuse_differing_weights()
    if attempt.phase == "plan":
        state = replace(state, known=attempt.digests)
    if attempt.phase == "finish":
        version = attempt.first.version if attempt.first.kind == "update" else record.version
        assert version is not None
        return state, [Decide(version)]
    return _proceed(state)


def _proceed(state: CoordinatorState) -> Step:
    attempt, phase = state.attempt, state.attempt.phase
    after = replace(attempt, phase=_AFTER[phase], agreed={}) if phase != "open" else Attempt(state.world)
    return replace(state, attempt=after), [Tell(Proceed(attempt.epoch, phase))]
