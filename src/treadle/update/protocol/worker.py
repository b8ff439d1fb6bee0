"""A worker's decisions: which messages may change what it holds and serves, and in which steps.

    closed ──begin──> loading ──finish──> prepared ──commit──> serving
       ^                 │                    │                   │
       └── nothing to ───┴── abort, settle ───┘                begin
           go back to

Each function returns the moves to be made, one after the other: what the engine does, and the state after it or after
its failure. Nothing is done by a function that raises RefusalError.

A worker belongs to the log whose version it holds, from its vote on to the one that it has voted for. It takes a
message of another log only if that says so (`takeover`). Closing keeps what is held: its own log opens it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from treadle.host.errors import TreadleError
from treadle.update.protocol.messages import Abort, Begin, Commit, Finish, Reason, Settle, State

Act: TypeAlias = Literal["close", "begin", "load", "finish", "invalidate", "open", "reopen", "abort", "restore"]
"""What the engine does. `open` is of a new version, `reopen` of the one held; `abort` leaves a load, `restore` too, and
loads the version before."""


class MessageRefusedError(TreadleError):
    """Why a message is not obeyed. `code` is for programs."""

    def __init__(self, code: Reason, text: str) -> None:
        super().__init__(text)
        self.code: Reason = code


@dataclass(frozen=True)
class Content:
    """Which weights are held, whole: the version that attempt `epoch` of log `log` committed."""

    log: str
    version: int
    epoch: int


@dataclass(frozen=True)
class WorkerState:
    """`log` is the one that this worker belongs to while it holds something, `attempt` that of attempt `epoch`.

    `served`: the version held was open when a load began. `touched`: some of it has been overwritten.
    `holds_slot`: no other process serves as this worker. `retired`: another has taken its place.
    """

    worker: int
    state: State = "closed"
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
        """What is served, or could be gone back to."""
        return self.held.version if self.held is not None else None

    @property
    def bound(self) -> str:
        """The log that this worker belongs to, nothing if none."""
        if self.state == "prepared" and self.begun is not None:
            return self.begun.log
        return self.log if self.held is not None else ""


@dataclass(frozen=True)
class Move:
    """One step of the engine, and the states it leads to."""

    act: Act
    ok: WorkerState
    failed: WorkerState


Moves: TypeAlias = tuple[list[Move], WorkerState]
"""The moves, and the state after all of them."""


def settle(state: WorkerState, message: Settle, *, can_restore: bool) -> Moves:
    """Learns what is committed: opens what it has voted for or holds, if that is it; else closes, and keeps it."""
    _fresh(state, message.epoch)
    _placed(state)
    foreign = state.bound and state.bound not in (message.log, *message.took)
    if foreign and not message.takeover:
        raise MessageRefusedError(
            "foreign",
            f"worker {state.worker} belongs to another log, {state.bound}, this one is {message.log}; use the log that "
            "its version was committed by, or take it over (takeover=True, --takeover) if that log is lost",
        )
    moves: list[Move] = []
    begun = state.begun
    if state.state == "prepared" and begun is not None and begun.log == message.log and state.epoch in message.epochs:
        moves, state = _open_new(state, begun)
    elif state.state in ("loading", "prepared"):
        moves, state = _back(state, can_restore=can_restore, reopen=False)
    held = state.held
    origins = ("", message.log, *message.took)  # nothing: committed by a log of before they had names
    if held is not None and held.version == message.version and held.epoch in message.epochs and held.log in origins:
        state = replace(state, log=message.log)
        if state.state != "serving":
            moves, state = _then(moves, *_reopen(state))
    else:  # an engine may be open though nothing is known of what it serves
        closed = replace(state, state="closed")
        moves, state = _then(moves, [Move("close", closed, state)], closed)
    return moves, replace(state, epoch=message.epoch, attempt=message.log)


def begin(state: WorkerState, message: Begin) -> Moves:
    """Closes and makes ready to load; the same again is no change."""
    _fresh(state, message.epoch)
    _placed(state)
    if state.state == "loading" and message == state.begun and not state.touched:
        return [], state
    if state.state not in ("serving", "closed"):
        raise MessageRefusedError(
            "order", f"worker {state.worker} is {state.state} at attempt {state.epoch}; settle first"
        )
    if message.log != state.attempt:
        raise MessageRefusedError(
            "foreign", f"worker {state.worker} was settled by log {state.attempt}, not {message.log}"
        )
    if message.partial and state.state != "serving":
        raise MessageRefusedError("order", f"worker {state.worker} serves no version that a part could be added to")
    served = state.state == "serving"
    loading = replace(state, state="loading", epoch=message.epoch, begun=message, served=served, touched=False)
    return [Move("close", loading, state), Move("begin", loading, loading)], loading


def load(state: WorkerState, epoch: int) -> Moves:
    """Takes a bucket in; from the first one on what was held is not whole any more."""
    _during(state, epoch, "loading")
    touched = replace(state, touched=True)
    return [Move("load", touched, touched)], touched


def finish(state: WorkerState, message: Finish) -> Moves:
    """Votes."""
    _during(state, message.epoch, "loading", "prepared")
    if state.state == "prepared":
        return [], state
    prepared = replace(state, state="prepared")
    return [Move("finish", prepared, state)], prepared


def commit(state: WorkerState, message: Commit) -> Moves:
    """Opens what it has voted for; the same again is no change."""
    _fresh(state, message.epoch)
    held = state.held
    if state.state == "serving" and held is not None and (held.epoch, held.version) == (message.epoch, message.version):
        return [], state
    begun = _during(state, message.epoch, "prepared")
    if begun.version != message.version:
        raise MessageRefusedError("order", f"version {begun.version} is prepared, not {message.version}")
    return _open_new(state, begun)


def abort(state: WorkerState, message: Abort, *, can_restore: bool) -> Moves:
    """Goes back to the version before."""
    _fresh(state, message.epoch)
    if message.epoch == state.epoch and state.state in ("loading", "prepared"):
        return _back(state, can_restore=can_restore, reopen=True)
    return [], state


def release(state: WorkerState, *, can_restore: bool) -> Moves:
    """Its update rank is gone: goes back, unless it has voted."""
    if state.state != "loading" or state.retired:
        return [], state
    return _back(state, can_restore=can_restore, reopen=True)


def retire(state: WorkerState) -> Moves:
    """Another process has taken its place: closes for good. Its slot is free once it has."""
    gone = replace(state, retired=True)
    if state.state != "serving":
        return [], gone
    closed = replace(gone, state="closed")
    return [Move("close", closed, gone)], closed


# ---- what they come to -----------------------------------------------------------------------------------------------


def _open_new(state: WorkerState, begun: Begin) -> Moves:
    lost = replace(state, state="closed", held=None, begun=None)
    held = Content(begun.log, begun.version, begun.epoch)
    serving = replace(state, state="serving", held=held, log=begun.log, begun=None)
    return [Move("invalidate", state, state), Move("open", serving, lost)], serving


def _reopen(state: WorkerState) -> Moves:
    serving = replace(state, state="serving")
    return [Move("reopen", serving, replace(state, state="closed", held=None))], serving


def _back(state: WorkerState, *, can_restore: bool, reopen: bool) -> Moves:
    """To the version before, if it is still there; it is opened only if it was open when the load began."""
    kept = replace(state, state="closed", begun=None)
    lost = replace(kept, held=None)
    if state.held is None or (state.touched and not (state.served and can_restore)):
        return [Move("abort", lost, lost)], lost
    moves = [Move("restore" if state.touched else "abort", kept, lost)]
    return _then(moves, *_reopen(kept)) if reopen and state.served else (moves, kept)


def _then(moves: list[Move], more: list[Move], state: WorkerState) -> Moves:
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
