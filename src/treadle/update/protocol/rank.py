"""An update rank's decisions: what it does next, and what its worker is told when an attempt ends early.

A rank does one thing at a time. `TellCoordinator` goes to the coordinator and is answered through `heard`; `AskWorker`
goes to its worker and is answered through `answered`; `Work` is its own and is answered through `worked`. Then
`AttemptDone`.

    Go ── Settle ── Settled ─> Send ── Sides ─> Layouts ── plan ── Agreed ─> Proceed ── Begin ── Agreed ─> Proceed
       ── load ── Finish ── Agreed (the vote) ─> Proceed (the decision) ── Commit ── Agreed ─> Proceed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from treadle.update.options import UpdateOptions
from treadle.update.protocol.control import Agreed, FromCoordinator, Go, Layouts, Phase, Proceed, Send, Settled
from treadle.update.protocol.messages import Begin, Commit, Finish, Settle, Status


@dataclass(frozen=True)
class TellCoordinator:
    """To the coordinator, which answers with one of these."""

    message: Any
    answers: tuple[type[Any], ...] = (Proceed,)


@dataclass(frozen=True)
class AskWorker:
    """Of the worker."""

    message: Settle | Begin | Finish | Commit


@dataclass(frozen=True)
class Work:
    """Of this rank's own: close workers that left the set, describe layouts, make the plan, move the buckets."""

    what: Literal["dismiss", "describe", "plan", "load"]
    about: Any = None


@dataclass(frozen=True)
class AttemptDone:
    """All is served as it should be."""


Action: TypeAlias = TellCoordinator | AskWorker | Work | AttemptDone


@dataclass(frozen=True)
class RankState:
    """`began`: the worker knows of the attempt. `loads`: it gets a version. `voted`: the coordinator may know that the
    worker is prepared, and only its word counts from then on. `decided`: that word was to commit.
    """

    rank: int
    options: UpdateOptions
    phase: Phase = "enter"
    epoch: int = 0
    log: str = ""
    version: int = 0
    began: bool = False
    loads: bool = False
    voted: bool = False
    decided: bool = False
    go: Go | None = None
    layouts: Layouts | None = None
    closed: tuple[int, ...] = ()
    plan: str = ""

    def in_doubt(self, *, told: bool) -> bool:
        """Is the decision unknown here; `told`: the coordinator has said how the attempt ended."""
        return self.voted and not self.decided and not told


Step: TypeAlias = tuple[RankState, Action]


def heard(state: RankState, message: FromCoordinator) -> Step:
    """The coordinator has answered."""
    if isinstance(message, Go):
        state = replace(state, phase="settle", epoch=message.epoch, log=message.log, go=message)
        return (state, Work("dismiss", message.left)) if message.left else (state, _settle(state))
    if isinstance(message, Send):
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
    return state, AskWorker(Commit(state.epoch, state.version)) if state.loads else _agreed(state)


def worked(state: RankState, value: Any = None) -> Step:
    """The rank has done work of its own; `value` is what came of it."""
    if state.phase == "settle":
        state = replace(state, closed=value)
        return state, _settle(state)
    if state.phase == "layout":
        return state, TellCoordinator(value, (Layouts, Proceed))
    if state.phase == "plan":
        state = replace(state, plan=value)
        return state, _agreed(state)
    state = replace(state, phase="finish")
    return (state, AskWorker(Finish(state.epoch))) if state.loads else _vote(state)


def answered(state: RankState, answer: Any) -> Step:
    """The worker has done what it was asked."""
    if state.phase == "settle":
        assert isinstance(answer, Status)
        settled = Settled(state.epoch, state.rank, answer, state.closed)
        return replace(state, began=True), TellCoordinator(settled, (Send, Layouts, Proceed))
    return _vote(state) if state.phase == "finish" else (state, _agreed(state))


Farewell: TypeAlias = Literal["commit", "abort", "nothing"]


def farewell(state: RankState, *, told: bool, committed: bool) -> Farewell:
    """What the worker is told of an attempt that ended early; `committed`: as far as this rank has heard.

    A worker that has voted is told nothing while the decision is not known here: it stays prepared.
    """
    if state.loads and (committed or state.decided):
        return "commit"
    return "abort" if state.began and not state.in_doubt(told=told) else "nothing"


def _settle(state: RankState) -> AskWorker:
    go, options = state.go, state.options
    assert go is not None
    told = go.epoch, go.committed, go.epochs, options.close, options.drain_s
    return AskWorker(Settle(*told, go.log, go.took, go.takeover))


def _begin(state: RankState) -> Begin:
    options, layouts = state.options, state.layouts
    assert layouts is not None
    how = options.rollback, options.close, options.drain_s, options.checked, layouts.only is not None
    return Begin(state.epoch, layouts.version, state.plan, *how, state.log)


def _agreed(state: RankState) -> TellCoordinator:
    return TellCoordinator(Agreed(state.epoch, state.rank, state.phase, state.plan if state.phase == "plan" else ""))


def _vote(state: RankState) -> Step:
    state = replace(state, voted=True)
    return state, _agreed(state)
