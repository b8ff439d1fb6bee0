"""An update rank's decisions: what it does next, and what it tells its worker when an attempt ends early.

A rank does one thing at a time, and each action has a function that takes its answer:

    TellCoordinator  a message to the coordinator     heard(state, message)
    AskWorker        a message to this rank's worker  answered(state, answer)
    Work             something the rank does itself   worked(state, value)
    AttemptDone      nothing is left to do

The messages of an attempt, in order:

    Go ── Grant ── Report ─> Describe ── Report ─> Layouts ── plan ── Report ─> Proceed ── Begin ── Report ─> Proceed
       ── load ── Finish ── Report (the vote) ─> Proceed (the decision) ── Grant ── Report ─> Proceed

An attempt that ends early goes through `ended` and `farewell` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from treadle.update.protocol.control import Fault, FromCoordinator, Go, Layouts, Phase, Proceed, Report, Sample, Sides
from treadle.update.protocol.update_messages import Begin, Describe, Finish, Grant, State, Status
from treadle.update.update_options import UpdateOptions
from treadle.wire.errors import WireError

Ending: TypeAlias = Literal["unknown", "lost", "stopped", "committed"]
"""What the coordinator said of an attempt that ended early: nothing so far; nothing, and its connection ended; that it
failed; or that it failed, and its version is committed."""


@dataclass(frozen=True)
class TellCoordinator:
    """Send `message` to the coordinator; it answers with one of the types `answers`."""

    message: Any
    answers: tuple[type[Any], ...] = (Proceed,)


@dataclass(frozen=True)
class AskWorker:
    """Send `message` to the worker and wait for its answer."""

    message: Grant | Begin | Finish


@dataclass(frozen=True)
class Work:
    """Do something alone: describe layouts, make the plan, move the buckets."""

    what: Literal["describe", "plan", "load"]
    about: Any = None


@dataclass(frozen=True)
class AttemptDone:
    """The attempt succeeded: every worker serves what it should."""


Action: TypeAlias = TellCoordinator | AskWorker | Work | AttemptDone


@dataclass(frozen=True)
class RankState:
    """One rank's view of one attempt.

    `speaks`: it has a worker, which may know of the attempt once this rank has heard `go`. `loads`: the worker gets a
    version. `voted`: the coordinator may know that the worker has staged; from then on only the coordinator's word
    counts. `decided`: that word was to commit. `worker_late`: a wait for the worker timed out, so an answer of it may
    still come. `digest` is the plan's, `plan` the worker's name for its part. `delta`: buckets have changed elements.
    `ending`: see `Ending`.
    """

    rank: int
    options: UpdateOptions
    phase: Phase = "enter"
    epoch: int = 0
    version: int = 0
    speaks: bool = True
    loads: bool = False
    voted: bool = False
    decided: bool = False
    worker_late: bool = False
    ending: Ending = "unknown"
    go: Go | None = None
    layouts: Layouts | None = None
    digest: str = ""
    plan: str = ""
    delta: bool = False
    samples: tuple[Sample, ...] = ()

    @property
    def log(self) -> str:
        """The log of the attempt; empty before Go."""
        return self.go.grant.log if self.go is not None else ""

    @property
    def is_committed(self) -> bool:
        """True where the coordinator has said so."""
        return self.decided or self.ending == "committed"

    @property
    def in_doubt(self) -> bool:
        """True where this rank cannot know the decision: it voted, and heard neither Proceed nor Fault."""
        return self.voted and not self.decided and self.ending in ("unknown", "lost")


Step: TypeAlias = tuple[RankState, Action]


def heard(state: RankState, message: FromCoordinator) -> Step:
    """Return the coordinator has answered."""
    if isinstance(message, Go):
        state = replace(state, phase="settle", epoch=message.epoch, go=message)
        return state, _settle(state)
    if isinstance(message, Describe):
        return replace(state, phase="layout"), Work("describe", message)
    if isinstance(message, Layouts):
        loads = state.rank in message.loads
        return replace(state, phase="plan", layouts=message, version=message.version, loads=loads), Work("plan")
    if not isinstance(message, Proceed) or message.phase == "open":
        return state, AttemptDone()
    if message.phase == "plan":
        state = replace(state, phase="begin")
        return state, AskWorker(_begin(state)) if state.loads else _agreed(state)
    if message.phase == "begin":
        return replace(state, phase="load"), Work("load")
    state = replace(state, phase="open", decided=True)
    return state, AskWorker(_grant(state, new=True)) if state.loads else _agreed(state)


def worked(state: RankState, value: Any = None, *, plan: str = "", delta: bool = False) -> Step:
    """Return the rank has done its own work; `value` is the result.

    `plan` is the worker's name for its part of the plan. `delta`: changed elements will move, no others.
    """
    if state.phase == "layout":
        assert isinstance(value, Sides)
        return state, TellCoordinator(Report(state.epoch, "layout", sides=value), (Layouts, Proceed))
    if state.phase == "plan":
        state = replace(state, digest=value, plan=plan, delta=delta)
        return state, _agreed(state)
    state = replace(state, phase="finish", samples=value if value is not None else ())
    return (state, AskWorker(Finish(state.epoch))) if state.loads else _vote(state)


_LEADS_TO: dict[Phase, State] = {"begin": "loading", "finish": "staged"}


def answered(state: RankState, status: Status) -> Step:
    """Return the worker has done what it was asked. Raises WireError where its status says that it has not."""
    expected = _LEADS_TO.get(state.phase, status.state)
    if status.state != expected:
        raise WireError(f"it is {status.state} where {expected} was expected")
    if state.phase == "settle":
        return state, _settled(state, status)
    return _vote(state) if state.phase == "finish" else (state, _agreed(state))


# ---- an attempt that ends early --------------------------------------------------------------------------------------


def timed_out(state: RankState) -> RankState:
    """Return the worker did not answer in time. Its answer may still come: it is not waited for a second time."""
    return replace(state, worker_late=True)


def ended(state: RankState, told: Fault | None, *, lost: bool) -> RankState:
    """Return the attempt is over: `told` is the coordinator's word on it, `lost` says that its connection ended."""
    if told is not None:
        return replace(state, ending="committed" if told.committed else "stopped")
    return replace(state, ending="lost" if lost else "unknown")


def farewell(state: RankState) -> Grant | None:
    """The last message to the worker. One that voted is told nothing while the decision is in doubt."""
    if state.loads and state.is_committed:
        return _grant(state, new=True)
    return _grant(state, new=False) if state.go is not None and not state.in_doubt else None


def is_vague(state: RankState, fault: Fault) -> bool:
    """Return whether whoever ended could not say at which bucket: this rank's own place is then the next best."""
    unplaced = fault.phase == "finish" and fault.bucket < 0 and state.phase == "load"
    return state.ending == "lost" or unplaced


# ---- messages --------------------------------------------------------------------------------------------------------


def _settle(state: RankState) -> AskWorker | TellCoordinator:
    """Tell the worker what is committed; a rank without one goes on."""
    return AskWorker(_grant(state, new=False)) if state.speaks else _settled(state, None)


def _grant(state: RankState, *, new: bool) -> Grant:
    """Return what is committed: the attempt's own version, where it is decided, or what was before."""
    assert state.go is not None
    grant = state.go.grant
    if not new:
        return grant
    return msgspec.structs.replace(grant, version=state.version, epochs=(*grant.epochs, state.epoch))


def _settled(state: RankState, status: Status | None) -> TellCoordinator:
    return TellCoordinator(Report(state.epoch, "settle", status), (Describe, Layouts, Proceed))


def _begin(state: RankState) -> Begin:
    options, layouts = state.options, state.layouts
    assert layouts is not None
    how = options.rollback_place, options.close, options.drain_s, layouts.only is not None
    return Begin(state.epoch, layouts.version, state.plan, *how, state.log, state.delta)


def _agreed(state: RankState) -> TellCoordinator:
    value = state.digest + (" changed elements" if state.delta else "") if state.phase == "plan" else ""
    return TellCoordinator(Report(state.epoch, state.phase, value=value))


def _vote(state: RankState) -> Step:
    state = replace(state, voted=True)
    return state, TellCoordinator(Report(state.epoch, "finish", samples=state.samples))
