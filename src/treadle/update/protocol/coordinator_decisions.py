"""The coordinator's decisions, phase by phase.

`hear` takes a rank's message. When all ranks have entered, the log must number the attempt (`Open`, answered through
`opened`); when all have voted, the log must write the decision (`Decide`, answered through `decided`). A log that
cannot be written ends the attempt (`stop`). The caller knows the deadlines and calls `stop`, or `leave_out` for agents
that are late; of time there are only leases: before workers close and before the decision, an attempt waits until those
of absent workers are over (`ticked`). Between attempts and in them, `reported` renews the leases of workers that hold
what is committed. Where an agent's worker holds something else, `reported` begins a recovery among the agents, which
gives way to a call for an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from treadle.update.protocol.attempt import Attempt, AttemptRefusedError
from treadle.update.protocol.control import (
    Asked,
    Call,
    Enter,
    Fault,
    Go,
    Layouts,
    Phase,
    Proceed,
    ToCoordinator,
)
from treadle.update.protocol.leases import Leases, is_past
from treadle.update.protocol.record import Member, Record, has_committed, is_foreign, is_outdated
from treadle.update.protocol.update_messages import Grant, Hello, Status
from treadle.update.update_options import UpdateOptions
from treadle.wire.errors import WireError

AGAIN_NS = 5_000_000_000
"""The least time between two recoveries that the coordinator begins itself."""

_AFTER: dict[Phase, Phase] = {"plan": "begin", "begin": "finish", "finish": "open", "open": "enter"}


@dataclass(frozen=True)
class Tell:
    """Send a message to some ranks."""

    message: Any
    ranks: tuple[int, ...]


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

    The first `world` ranks call for updates; `agents` are those that have joined besides, and no attempt begins before
    `expected` of them have. `late` are agents without which an attempt went on, with the reason. `again_ns`: before
    that no recovery of agents is begun. `lost`: names of calling ranks whose connection ended. `known`: digests of the
    layouts of which all ranks have made plans. `where` is the log's directory, for errors. `last` is the last attempt
    that is over.
    """

    world: int
    attempt: Attempt
    where: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)
    known: dict[int, tuple[str, str]] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    last: int = 0
    agents: frozenset[int] = frozenset()
    expected: int = 0
    late: Mapping[int, str] = field(default_factory=dict)
    options: UpdateOptions = field(default_factory=UpdateOptions)
    again_ns: int = 0

    @property
    def waits_ns(self) -> int | None:
        """Until when a phase that all ranks have done waits for leases of other workers; 0 for not, None for ever."""
        attempt = self.attempt
        waits = attempt.phase in ("plan", "finish") and self.is_complete
        if not waits or self.leases.lease_ns is None or attempt.asked.kind != "update":
            return 0
        return self.leases.ends_ns({s.incarnation for rank, s in attempt.statuses.items() if rank in attempt.said})

    @property
    def missing(self) -> list[int]:
        """Ranks that have not reported in this phase."""
        return [rank for rank in self.attempt.cast if rank not in self.attempt.spoken]

    @property
    def num_spoken(self) -> int:
        """How many ranks have reported in this phase."""
        return len(self.attempt.spoken)

    @property
    def num_awaited(self) -> int:
        """How many more agents must join before an attempt begins."""
        return max(0, self.expected - len(self.agents))

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks that take part have reported in this phase."""
        entering = self.attempt.phase == "enter"
        some = 0 < self.num_spoken >= self.attempt.num_cast
        return some and not self.missing and not (entering and self.num_awaited)


Step: TypeAlias = tuple[CoordinatorState, list[Action]]


def hear(state: CoordinatorState, rank: int, message: ToCoordinator, record: Record, now_ns: int = 0) -> Step:
    """Take a rank's message; `record` is the log's."""
    state = _heard(state, rank)
    attempt, before = state.attempt, list[Action]()
    if isinstance(message, Enter):
        if (refusal := _turn_away(state, rank, message)) is not None:
            return state, [Tell(refusal, (rank,))]
        state, before = _entered(state, rank, message)
        attempt = state.attempt
    elif isinstance(message, Status):
        return reported(state, rank, message, record, now_ns)
    elif isinstance(message, Fault) and not message.epoch:
        return _leave(state, rank, message)
    elif isinstance(message, Hello) or message.epoch != attempt.epoch or not attempt.epoch:
        return state, []  # the message belongs to an attempt that is over
    elif isinstance(message, Fault):
        return stop(state, message)
    elif message.phase == attempt.phase:
        attempt = replace(attempt, said={**attempt.said, rank: message})
    state, actions = _go_on(replace(state, attempt=attempt), record, now_ns)
    return state, [*before, *actions]


def _heard(state: CoordinatorState, rank: int) -> CoordinatorState:
    """An agent that was late is not late any more."""
    if rank not in state.late:
        return state
    return replace(state, late={r: why for r, why in state.late.items() if r != rank})


def _go_on(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    return _try_to_advance(state, record, now_ns) if state.is_complete else (state, [])


def _turn_away(state: CoordinatorState, rank: int, entry: Enter) -> Fault | None:
    """Return why a rank cannot enter, if it cannot."""
    attempt = state.attempt
    if rank >= state.world:
        if attempt.phase == "enter" and rank in attempt.called and entry.call == attempt.call:
            return None
        return Fault(0, "the caller", "enter", -1, "the attempt of this call is over", call=entry.call)
    if not state.lost:
        return None
    gone = ", ".join(state.lost.values())
    return Fault(0, gone, "enter", -1, "lost in an earlier attempt; start the update ranks again")


def _entered(state: CoordinatorState, rank: int, entry: Enter) -> Step:
    """Note an entry. The first one of a calling rank ends a recovery of agents, and calls the agents."""
    attempt, actions = state.attempt, list[Action]()
    if rank < state.world and (attempt.phase != "enter" or attempt.own is not None):
        if attempt.own is not None:
            fault = attempt.fault(f"update rank {rank}", "calls for an update, which comes before a recovery")
        else:
            fault = attempt.fault(f"update rank {rank}", "has given up, and begins another attempt")
        state, actions = stop(state, fault)
    if state.attempt.is_idle:
        state, called = _call(state, entry.asked, state.agents)
        actions = [*actions, *called]
    attempt = state.attempt
    return replace(state, attempt=replace(attempt, entered={**attempt.entered, rank: entry})), actions


def _call(state: CoordinatorState, asked: Asked, agents: frozenset[int]) -> Step:
    """Call agents to an attempt that begins, but for those that were late and have not been heard since."""
    agents = agents.difference(state.late)
    attempt = replace(state.attempt, call=state.attempt.call + 1, called=agents, left_out=state.late)
    told: list[Action] = [Tell(Call(attempt.call, asked), tuple(sorted(agents)))] if agents else []
    return replace(state, attempt=attempt), told


def ticked(state: CoordinatorState, record: Record, now_ns: int) -> Step:
    """Go on where an attempt waited for leases that are over now."""
    return _try_to_advance(state, record, now_ns) if state.waits_ns else (state, [])


def reported(state: CoordinatorState, rank: int, status: Status, record: Record, now_ns: int) -> Step:
    """Grant a lease to a worker that holds, or has staged, what is committed, if it is a member.

    During an attempt only workers that take part keep theirs, and only until they close. For an agent's worker that
    serves something else, or nothing, begin a recovery.
    """
    leases, attempt = state.leases, state.attempt
    is_member = status.incarnation in record.incarnations
    if leases.lease_ns is None or not is_member or not has_committed(record, status) or status.term > record.term:
        return _fill(state, rank, status, record, now_ns)
    entry = attempt.entered[rank].status if rank in attempt.entered else None
    takes_part = entry is not None and entry.incarnation == status.incarnation and status.state in ("serving", "lapsed")
    if is_foreign(record, status.log) or not (attempt.phase == "enter" or takes_part):
        return state, []
    grant = _grant(state.last, record, stamp_ns=status.stamp_ns, lease_ns=leases.lease_ns)
    return replace(state, leases=leases.granted(status.incarnation, now_ns)), [Tell(grant, (rank,))]


def _grant(epoch: int, record: Record, **how: Any) -> Grant:
    """Say what is committed."""
    return Grant(epoch, record.version, record.epochs, log=record.id, took=record.took, term=record.term, **how)


def _fill(state: CoordinatorState, rank: int, status: Status, record: Record, now_ns: int) -> Step:
    """Begin a recovery among the agents, where a worker of one does not serve what is committed."""
    serves = status.state == "serving" and has_committed(record, status)
    busy = not state.attempt.is_idle or now_ns < state.again_ns or state.num_awaited > 0
    if rank not in state.agents or serves or busy or record.version is None:
        return state, []
    if not status.can_export or is_foreign(record, status.log) or is_outdated(record, status):
        return state, []  # its peers are engines of the same kind
    asked = Asked("recover", 0, options=state.options)
    again_ns = now_ns + max(AGAIN_NS, state.leases.lease_ns or 0)
    state = replace(state, attempt=replace(state.attempt, own=asked), again_ns=again_ns)
    return _call(state, asked, state.agents)


def malformed(state: CoordinatorState, rank: int, who: str, text: str, record: Record) -> Step:
    """End the attempt of a rank that sent something unreadable.

    Where ranks enter, it counts as that rank's entry: a Fault would not reach the ranks that have not begun yet.
    """
    fault = state.attempt.fault(who, text)
    if state.attempt.phase != "enter":
        return stop(state, fault)
    asked, call = Asked("update", 0), state.attempt.call
    return hear(state, rank, Enter(None, asked, "", "", None, 0, fault, call=call), record)


def _leave(state: CoordinatorState, rank: int, fault: Fault) -> Step:
    """A rank that has not heard Go cannot take part any more: all hear of it once all have entered."""
    attempt = state.attempt
    if rank >= state.world and fault.call != attempt.call:
        return state, []  # an agent answers an earlier call
    if attempt.phase != "enter":  # Go is on its way
        return stop(state, msgspec.structs.replace(fault, epoch=attempt.epoch))
    if rank not in attempt.entered:
        return state, []  # the attempt is over
    entry = msgspec.structs.replace(attempt.entered[rank], fault=fault)
    return replace(state, attempt=replace(attempt, entered={**attempt.entered, rank: entry})), []


def opened(state: CoordinatorState, epoch: int, record: Record) -> Step:
    """Return the log has numbered the attempt."""
    attempt = state.attempt
    cast, asked = attempt.cast, attempt.asked
    state = replace(state, attempt=replace(attempt, epoch=epoch, phase="settle"))
    options = asked.options
    # Leases with an end are granted to workers that are reported, and not here.
    lease_ns = 0 if state.leases.lease_ns is not None else None
    how = {"close": options.close, "drain_s": options.drain_s, "takeover": asked.takeover, "lease_ns": lease_ns}
    grant = _grant(epoch, record, **how)
    return state, [Tell(Go(cast, grant, attempt.device), cast)]


def decided(state: CoordinatorState) -> Step:
    """Return the decision is on disk: tell the ranks."""
    attempt, leases = replace(state.attempt, committed=True), state.leases
    if attempt.asked.kind == "update":
        leases = leases.without(attempt.incarnations)  # with their votes they gave them up
    return _proceed(replace(state, attempt=attempt, leases=leases))


def stop(state: CoordinatorState, fault: Fault) -> Step:
    """End the attempt on all ranks, whichever call the fault answers."""
    attempt = state.attempt
    told = msgspec.structs.replace(fault, epoch=attempt.epoch, committed=attempt.committed, call=0)
    return over(state), [Tell(told, tuple({*attempt.cast, *attempt.entered}))]


def over(state: CoordinatorState) -> CoordinatorState:
    """Return the state after the end of the attempt."""
    before = state.attempt
    attempt = Attempt(state.world, call=before.call, grouped=before.grouped)
    return replace(state, attempt=attempt, last=max(state.last, before.epoch))


def joined(state: CoordinatorState, rank: int) -> Step:
    """A rank has joined. A new rank knows no layouts, so all are told again. An agent is called to what begins."""
    state = replace(state, lost={r: name for r, name in state.lost.items() if r != rank}, known={})
    if rank < state.world:
        return state, []
    agents = state.agents | {rank}
    state = replace(state, agents=agents, expected=state.expected if len(agents) < state.expected else 0)
    attempt = state.attempt
    if attempt.phase != "enter" or attempt.is_idle:
        return state, []
    state = replace(state, attempt=replace(attempt, called=attempt.called | {rank}))
    return state, [Tell(Call(attempt.call, attempt.asked), (rank,))]


def lost(state: CoordinatorState, rank: int, name: str, text: str, record: Record, now_ns: int = 0) -> Step:
    """A rank's connection has ended. That ends the attempt that it takes part in, unless an agent was yet to enter."""
    attempt = state.attempt
    if rank < state.world:
        state = replace(state, lost={**state.lost, rank: name})
    else:
        state = replace(_heard(state, rank), agents=state.agents - {rank})
        if attempt.phase == "enter" and rank in attempt.called:
            entered = {r: entry for r, entry in attempt.entered.items() if r != rank}
            attempt = replace(attempt, called=attempt.called - {rank}, entered=entered)
            if attempt.own is not None and not attempt.called:
                return over(state), []
            return _go_on(replace(state, attempt=attempt), record, now_ns)
    if attempt.is_idle or rank not in attempt.cast:
        return state, []
    return stop(state, attempt.fault(name, f"lost: {text}"))


def leave_out(state: CoordinatorState, text: str, record: Record, now_ns: int) -> Step | None:
    """Go on without agents that have not entered, if the policy allows that; None where other ranks are missing.

    They are not called again before they are heard.
    """
    late, attempt = state.missing, state.attempt
    if attempt.phase != "enter" or state.leases.least is None or not late or min(late) < state.world:
        return None
    called, left_out = attempt.called.difference(late), dict.fromkeys(late, text)
    attempt = replace(attempt, called=called, left_out={**attempt.left_out, **left_out})
    state = replace(state, attempt=attempt, late={**state.late, **left_out})
    return _go_on(state, record, now_ns)


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
        attempt = replace(attempt, settled=attempt.said, said={})
        attempt.refuse_strangers()
        if attempt.digests == state.known:
            return _lay_out(replace(state, attempt=attempt), record, None)
        attempt = replace(attempt.with_group(), phase="layout")
        return replace(state, attempt=attempt), [Tell(told, (rank,)) for rank, told in attempt.questions().items()]
    if attempt.phase == "layout":
        return _lay_out(state, record, attempt.catalogue())
    return _agree(state, record, now_ns)


def _open(state: CoordinatorState, record: Record) -> Step:
    """Have the attempt numbered. Leases of processes that have ended are over, by what the entries say."""
    attempt, leases = state.attempt, state.leases
    members = attempt.members_after(record, leases)
    start = attempt.start_from(record)
    leases = leases.without(attempt.ended(record))
    if attempt.asked.takeover:  # of other leases than those of the workers here the caller says that they are over
        leases = replace(leases, out=dict.fromkeys(attempt.incarnations))
    known = [status.term for status in attempt.statuses.values() if status.log == record.id]
    term = max(record.term, *(term + 1 for term in known if term > record.term), 0)
    start = msgspec.structs.replace(start, term=term)
    return replace(state, leases=leases), [Open(attempt.last_epoch(), start, members)]


def _lay_out(state: CoordinatorState, record: Record, catalogue: bytes | None) -> Step:
    attempt = state.attempt
    layouts: Layouts | None = attempt.layouts(record, catalogue)
    if layouts is None:
        return over(state), [Tell(Proceed(attempt.epoch, "open"), attempt.cast)]
    known = state.known if catalogue is None else {}  # until all ranks have made their plans of it
    attempt = replace(attempt, phase="plan", said={}).with_group()
    return replace(state, attempt=attempt, known=known), [Tell(layouts, attempt.cast)]


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
        version = attempt.asked.version if attempt.asked.kind == "update" else record.version
        assert version is not None
        return state, [Decide(version)]
    return _proceed(state)


def _proceed(state: CoordinatorState) -> Step:
    attempt, phase = state.attempt, state.attempt.phase
    told: list[Action] = [Tell(Proceed(attempt.epoch, phase), attempt.cast)]
    if phase == "open":
        return over(state), told
    return replace(state, attempt=replace(attempt, phase=_AFTER[phase], said={})), told
