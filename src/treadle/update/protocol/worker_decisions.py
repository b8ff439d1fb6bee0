"""A worker's decisions: which messages may change what it holds and serves, and in which steps.

                grant of what is held
    lapsed ──────────────────────────────────> serving
      │  ^                                      │   ^
      │  └── lease over, grant of other content │   │ grant of what is staged
    begin                                     begin │
      │                                         │   │
      └──────────────> loading <────────────────┘   │
                         │                          │
                         └─────────finish─────────> staged

A grant of anything else ends a load: the worker goes back to the version before, if it is still there.

Each function returns the moves to make, one after the other: what the engine does, the state after that, and the state
after its failure. Where a function raises MessageRefusedError, nothing is done.

A worker belongs to the log whose version it holds; from its vote on, to the log it voted for. It takes messages of
another log only with `takeover`. A worker that is closed keeps its weights: its own log can open it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from treadle.host.errors import TreadleError
from treadle.update.protocol.update_messages import Begin, Finish, Grant, Reason, State

Act: TypeAlias = Literal["close", "begin", "load", "finish", "invalidate", "open", "reopen", "abort", "restore"]
"""What the engine does. `open` serves a new version, `reopen` the one held; `abort` leaves a load, `restore` leaves it
and loads the rollback copy."""


class MessageRefusedError(TreadleError):
    """A message that the worker does not obey; the text has the reason. `code` is for programs."""

    def __init__(self, code: Reason, text: str) -> None:
        super().__init__(text)
        self.code: Reason = code


@dataclass(frozen=True)
class Content:
    """The weights that a worker holds, whole: the version that attempt `epoch` of log `log` committed."""

    log: str
    version: int
    epoch: int


@dataclass(frozen=True)
class WorkerState:
    """A worker's state. `log` is the log it belongs to while it holds weights, `attempt` the log of attempt `epoch`.

    `served`: the version held was served when the load began. `touched`: the load has overwritten some of it.
    `holds_slot`: no other process serves as this worker. `retired`: another process has taken its place.
    """

    worker: int
    state: State = "lapsed"
    held: Content | None = None
    log: str = ""
    epoch: int = 0
    attempt: str = ""
    begun: Begin | None = None
    served: bool = False
    touched: bool = False
    holds_slot: bool = True
    retired: bool = False

    @property
    def version(self) -> int | None:
        """The version that is served, or can be gone back to."""
        return self.held.version if self.held is not None else None

    @property
    def bound(self) -> str:
        """The log that this worker belongs to; empty if none."""
        if self.state == "staged" and self.begun is not None:
            return self.begun.log
        return self.log if self.held is not None else ""


@dataclass(frozen=True)
class EngineMove:
    """One step of the engine, and the states that its success and its failure lead to."""

    act: Act
    ok: WorkerState
    failed: WorkerState


Moves: TypeAlias = tuple[list[EngineMove], WorkerState]
"""The moves, and the state after all of them."""


def grant(state: WorkerState, message: Grant, *, can_restore: bool) -> Moves:
    """Learn what is committed. Serve it if it is staged or held; else close, and keep the weights.

    A load that is under way is over: the attempts up to the grant's have ended.
    """
    _fresh(state, message.epoch)
    _placed(state)
    foreign = state.bound and state.bound not in (message.log, *message.took)
    if foreign and not message.takeover:
        raise MessageRefusedError(
            "foreign",
            f"worker {state.worker} belongs to another log, {state.bound}, this one is {message.log}; use the log that "
            "its version was committed by, or take it over (takeover=True, --takeover) if that log is lost",
        )
    moves: list[EngineMove] = []
    begun = state.begun
    if state.state == "staged" and begun is not None and begun.log == message.log and state.epoch in message.epochs:
        moves, state = _open_new(state, begun)
    elif state.state in ("loading", "staged"):
        moves, state = _back(state, can_restore=can_restore, reopen=False)
    if is_granted(state.held, message):
        state = replace(state, log=message.log)
        if state.state != "serving":
            moves, state = _then(moves, *_reopen(state))
    else:  # close even an unknown version: an engine may have been open before its endpoint was
        closed = replace(state, state="lapsed")
        moves, state = _then(moves, [EngineMove("close", closed, state)], closed)
    return moves, replace(state, epoch=message.epoch, attempt=message.log)


def is_granted(held: Content | None, message: Grant) -> bool:
    """Return whether a grant names what a worker holds."""
    origins = ("", message.log, *message.took)  # empty: committed by a log written before logs had ids
    return held is not None and held.version == message.version and held.epoch in message.epochs and held.log in origins


def begin(state: WorkerState, message: Begin) -> Moves:
    """Close and get ready to load. The same message again changes nothing."""
    _fresh(state, message.epoch)
    _placed(state)
    if state.state == "loading" and message == state.begun and not state.touched:
        return [], state
    if state.state not in ("serving", "lapsed"):
        raise MessageRefusedError(
            "order", f"worker {state.worker} is {state.state} at attempt {state.epoch}; settle first"
        )
    if message.log != state.attempt:
        raise MessageRefusedError(
            "foreign", f"worker {state.worker} was settled by log {state.attempt}, not {message.log}"
        )
    if (message.partial or message.delta) and state.state != "serving":
        raise MessageRefusedError("order", f"worker {state.worker} serves no version that a part could be added to")
    served = state.state == "serving"
    loading = replace(state, state="loading", epoch=message.epoch, begun=message, served=served, touched=False)
    return [EngineMove("close", loading, state), EngineMove("begin", loading, loading)], loading


def load(state: WorkerState, epoch: int) -> Moves:
    """Load a bucket. From the first one on, the version held is torn."""
    _during(state, epoch, "loading")
    touched = replace(state, touched=True)
    return [EngineMove("load", touched, touched)], touched


def finish(state: WorkerState, message: Finish) -> Moves:
    """Make the version whole and vote for it."""
    _during(state, message.epoch, "loading", "staged")
    if state.state == "staged":
        return [], state
    staged = replace(state, state="staged")
    return [EngineMove("finish", staged, state)], staged


def release(state: WorkerState, *, can_restore: bool) -> Moves:
    """Return the update rank is gone: go back, unless this worker has voted."""
    if state.state != "loading" or state.retired:
        return [], state
    return _back(state, can_restore=can_restore, reopen=True)


def retire(state: WorkerState) -> Moves:
    """Another process has taken this worker's place: close for good. The slot may be released after that."""
    gone = replace(state, retired=True)
    if state.state != "serving":
        return [], gone
    closed = replace(gone, state="lapsed")
    return [EngineMove("close", closed, gone)], closed


# ---- moves -----------------------------------------------------------------------------------------------------------


def _open_new(state: WorkerState, begun: Begin) -> Moves:
    lost = replace(state, state="lapsed", held=None, begun=None)
    held = Content(begun.log, begun.version, begun.epoch)
    serving = replace(state, state="serving", held=held, log=begun.log, begun=None)
    return [EngineMove("invalidate", state, state), EngineMove("open", serving, lost)], serving


def _reopen(state: WorkerState) -> Moves:
    serving = replace(state, state="serving")
    return [EngineMove("reopen", serving, replace(state, state="lapsed", held=None))], serving


def _back(state: WorkerState, *, can_restore: bool, reopen: bool) -> Moves:
    """Move to the version before, if it is still there; it is opened if it was served when the load began."""
    kept = replace(state, state="lapsed", begun=None)
    lost = replace(kept, held=None)
    if state.held is None or (state.touched and not (state.served and can_restore)):
        return [EngineMove("abort", lost, lost)], lost
    moves = [EngineMove("restore" if state.touched else "abort", kept, lost)]
    return _then(moves, *_reopen(kept)) if reopen and state.served else (moves, kept)


def _then(moves: list[EngineMove], more: list[EngineMove], state: WorkerState) -> Moves:
    return [*moves, *more], state


def _fresh(state: WorkerState, epoch: int) -> None:
    if state.retired:
        raise MessageRefusedError("taken", f"another process has taken the place of worker {state.worker}")
    if epoch < state.epoch:
        raise MessageRefusedError("stale", f"attempt {epoch} is over, worker {state.worker} is at {state.epoch}")


def _placed(state: WorkerState) -> None:
    if not state.holds_slot:
        raise MessageRefusedError(
            "order", f"worker {state.worker} waits for an earlier process in its place to close or end"
        )


def _during(state: WorkerState, epoch: int, *states: State) -> Begin:
    _fresh(state, epoch)
    if epoch != state.epoch or state.state not in states or state.begun is None:
        raise MessageRefusedError(
            "order", f"worker {state.worker} is {state.state} at attempt {state.epoch}, not in {epoch}"
        )
    return state.begun
