"""The coordinator's decisions, phase by phase.

`hear` takes a rank's message. When all ranks have entered, the log must number the attempt (`Open`, answered through
`opened`); when all have voted, the log must write the decision (`Decide`, answered through `decided`). A log that
cannot be written ends the attempt (`stop`). The caller knows the deadlines and calls `stop`; of time there are only
leases: before workers close and before the decision, an attempt waits until those of absent workers are over
(`ticked`). Between attempts and in them, `reported` renews the leases of workers that hold what is committed.
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
    Report,
    Settled,
    Sides,
    Stop,
    ToCoordinator,
)
from treadle.update.protocol.leases import Leases, is_past
from treadle.update.protocol.record import Member, Record, has_committed, is_foreign
from treadle.update.protocol.update_messages import Grant
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
    `where` is the log's directory, for errors. `last` is the last attempt that is over.
    """

    world: int
    attempt: Attempt
    where: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)
    sides: dict[int, Sides] = field(default_factory=dict)
    known: dict[int, tuple[str, str]] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    last: int = 0

    @property
    def waits_ns(self) -> int | None:
        """Until when a phase that all ranks have done waits for leases of other workers; 0 for not, None for ever."""
        attempt = self.attempt
        waits = attempt.phase in ("plan", "finish") and self.num_spoken == self.world
        if not waits or self.leases.lease_ns is None or attempt.first.kind != "update":
            return 0
        return self.leases.ends_ns({s.incarnation for rank, s in attempt.statuses.items() if rank in attempt.agreed})

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


def hear(state: CoordinatorState, rank: int, message: ToCoordinator, record: Record, now_ns: int = 0) -> Step:
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
    elif isinstance(message, Report):
        return reported(state, rank, message, record, now_ns)
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
    state, actions = _try_to_advance(state, record, now_ns)
    return state, [*before, *actions]


def ticked(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    """Go on where an attempt waited for leases that are over now."""
    return _try_to_advance(state, record, now_ns) if state.waits_ns else (state, [])


def reported(state: CoordinatorState, rank: int, report: Report, record: Record, now_ns: int) -> Step:
    """Grant a lease to a worker that holds, or has staged, what is committed, if it is a member.

    During an attempt only workers that take part keep theirs, and only until they close.
    """
    status, leases, attempt = report.status, state.leases, state.attempt
    is_member = any(member.incarnation == status.incarnation for member in record.members)
    if leases.lease_ns is None or not is_member or not has_committed(record, status) or status.term > record.term:
        return state, []
    entry = attempt.entered[rank].status if rank in attempt.entered else None
    takes_part = entry is not None and entry.incarnation == status.incarnation and status.state in ("serving", "lapsed")
    if is_foreign(record, status.log) or not (attempt.phase == "enter" or takes_part):
        return state, []
    grant = Grant(
        state.last,
        record.version,
        record.epochs,
        log=record.id,
        took=record.took,
        term=record.term,
        stamp_ns=status.stamp_ns,
        lease_ns=leases.lease_ns,
    )
    return replace(state, leases=leases.granted(status.incarnation, now_ns)), [Tell(grant, rank)]


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
    state = replace(state, attempt=replace(attempt, epoch=epoch, phase="settle"))
    told = record.version, record.epochs, record.id, record.took
    return state, [Tell(Go(epoch, *told, attempt.first.takeover, record.term))]


def decided(state: CoordinatorState) -> Step:
    """Return the decision is on disk: tell the ranks."""
    attempt, leases = replace(state.attempt, committed=True), state.leases
    if attempt.first.kind == "update":
        leases = leases.without(attempt.incarnations)  # with their votes they gave them up
    return _proceed(replace(state, attempt=attempt, leases=leases))


def stop(state: CoordinatorState, fault: Fault) -> Step:
    """End the attempt on all ranks."""
    told = Stop(state.attempt.epoch, fault, state.attempt.committed)
    return replace(over(state), sides={}), [Tell(told)]


def over(state: CoordinatorState) -> CoordinatorState:
    """Return the state after the end of the attempt."""
    return replace(state, attempt=Attempt(state.world), last=max(state.last, state.attempt.epoch))


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


def _try_to_advance(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    attempt = state.attempt
    try:
        return _advance(state, record, now_ns)
    except AttemptRefusedError as refusal:
        return stop(state, attempt.fault(refusal.who, str(refusal)))
    except WireError as error:
        return stop(state, fault_of_log(state, error))


def _advance(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    """All ranks have reported in this phase: go on to the next."""
    attempt = state.attempt
    if attempt.phase == "enter":
        attempt.refuse_entries(record, state.leases, state.where)
        return _open(state, record)
    if attempt.phase == "settle":
        attempt.refuse_strangers()
        if attempt.digests == state.known:
            return _lay_out(state, record, None)
        state = replace(state, attempt=replace(attempt, phase="layout"), sides={})
        return state, [Tell(send, rank) for rank, send in attempt.sends().items()]
    if attempt.phase == "layout":
        state, actions = _lay_out(state, record, attempt.catalogue(state.sides))
        return replace(state, sides={}), actions
    return _agree(state, record, now_ns)


def _open(state: CoordinatorState, record: Record) -> Step:
    """Have the attempt numbered. Leases of processes that have ended are over, by what the entries say."""
    attempt, leases = state.attempt, state.leases
    members = attempt.members_after(record, leases)
    start = attempt.start_from(record)
    leases = leases.without(attempt.ended(record))
    if attempt.first.takeover:  # of other leases than those of the workers here the caller says that they are over
        leases = replace(leases, out=dict.fromkeys(attempt.incarnations))
    known = [status.term for status in attempt.statuses.values() if status.log == record.id]
    term = max(record.term, *(term + 1 for term in known if term > record.term), 0)
    start = msgspec.structs.replace(start, term=term)
    return replace(state, leases=leases), [Open(attempt.last_epoch(), start, members)]


def _lay_out(state: CoordinatorState, record: Record, catalogue: bytes | None) -> Step:
    attempt = state.attempt
    layouts: Layouts | None = attempt.layouts(record, catalogue)
    if layouts is None:
        return over(state), [Tell(Proceed(attempt.epoch, "open"))]
    known = state.known if catalogue is None else {}  # until all ranks have made their plans of it
    return replace(state, attempt=replace(attempt, phase="plan"), known=known), [Tell(layouts)]


def _agree(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    attempt = state.attempt
    different = attempt.disagreement()
    if different is not None:
        raise AttemptRefusedError("the update ranks", different)
    attempt.refuse_differing_weights()
    if state.waits_ns is None:
        text = "a worker that takes no part has a lease without end; end it and take the set over (takeover=True)"
        raise AttemptRefusedError("the coordinator (update rank 0)", text)
    if not is_past(state.waits_ns, now_ns):
        return state, []
    if attempt.phase == "plan":
        state = replace(state, known=attempt.digests)
    if attempt.phase == "finish":
        version = attempt.first.version if attempt.first.kind == "update" else record.version
        assert version is not None
        return state, [Decide(version)]
    return _proceed(state)


def _proceed(state: CoordinatorState) -> Step:
    attempt, phase = state.attempt, state.attempt.phase
    told: list[Action] = [Tell(Proceed(attempt.epoch, phase))]
    if phase == "open":
        return over(state), told
    return replace(state, attempt=replace(attempt, phase=_AFTER[phase], agreed={})), told
