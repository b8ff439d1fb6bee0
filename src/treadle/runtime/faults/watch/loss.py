"""RankLostError, which every rank raises when one is lost, and its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from treadle.host.errors import PortableError
from treadle.host.pressure import short_of_cores
from treadle.runtime.faults.progress.progress_page import OUTSIDE, Snapshot
from treadle.runtime.faults.watch.loss_messages import UNKNOWN, LossKind, Lost

EXIT_LOST = 75
"""The exit code of a process that was ended because a rank was lost and its main thread did not react."""

Naming: TypeAlias = Callable[[int, int], str]
"""Returns the text of an op, such as "F3.0", from its rank and its number."""

_TIMED_OUT = ("timed out", "timeout")
_NETWORK = (*_TIMED_OUT, "connection closed", "connection reset", "connection refused", "broken pipe")

_INTERRUPTS = ("KeyboardInterrupt", "SystemExit")


class RankLostError(PortableError, RuntimeError):
    """A rank of the pipeline was lost; every other rank raises this error, and all name the same rank.

    `kind` is "killed", "raised" (an error, or an interrupt), "hung", "left" (it ended or closed its Pipeline while
    others still needed it), "cut" (its connection broke although it lives) or "absent" (it did not come to make the
    pipeline). `op` is the op of the lost rank, `waiting_for` the op or rank that this rank waited for.

    Example:
        >>> try:
        ...     raise RankLostError("rank 2 was lost", rank=2, kind="killed", op="F3.2", waiting_for=None)
        ... except RankLostError as lost:
        ...     print(lost.rank, lost.kind, lost.op)
        2 killed F3.2

    """

    def __init__(self, message: str, *, rank: int, kind: str, op: str | None, waiting_for: str | None) -> None:
        super().__init__(message)
        self.rank, self.kind, self.op, self.waiting_for = rank, kind, op, waiting_for


def rank_lost(
    lost: Lost, *, rank: int, here: Snapshot, name: Naming, deadline_s: float, waiting_for: str | None = None
) -> RankLostError:
    """Returns the error of rank `rank`, which is at `here`, about a loss."""
    first = f"rank {lost.rank} was lost first: {_what(lost, name)}{_place(lost, name)}{_details(lost, deadline_s)}"
    if waiting_for is None and here.waits_for >= 0:
        waiting_for = f"rank {here.waits_for}"
    own = _op(rank, here.op, name)
    this = f"This rank ({rank}) was {f'at {own}' if own is not None else 'between steps'}"
    this += f", waiting for {waiting_for}." if waiting_for is not None else "."
    op = _op(lost.rank, lost.op, name)
    return RankLostError(f"{first} {this}", rank=lost.rank, kind=lost.kind.word, op=op, waiting_for=waiting_for)


def timed_out(error: BaseException) -> bool:
    """True if a wait reached its deadline, by the texts of backends; else its peer has closed."""
    return isinstance(error, TimeoutError) or any(word in str(error).lower() for word in _TIMED_OUT)


def from_network(error: BaseException) -> bool:
    """True for errors that a wait raises when its peer is gone or late; false for this rank's own."""
    return isinstance(error, ConnectionError) or any(word in str(error).lower() for word in _NETWORK)


def _op(rank: int, op: int, name: Naming) -> str | None:
    if op in (OUTSIDE, UNKNOWN):
        return None
    try:
        return name(rank, op)
    except Exception:  # a broken rank may have sent any number: the loss itself must be told
        return f"op {op}"


def _what(lost: Lost, name: Naming) -> str:
    match lost.kind:
        case LossKind.LEFT:
            return "it ended or closed its Pipeline"
        case LossKind.CUT:
            return "its connection broke, though it lives,"
        case LossKind.RAISED:
            error = lost.text.partition(":")[0]
            return f"interrupted by {error}" if error in _INTERRUPTS else f"raised {error}"
        case _:
            return lost.kind.word


def _place(lost: Lost, name: Naming) -> str:
    if lost.op == UNKNOWN:
        return ""
    seen = "" if lost.exact else ", last seen"
    op = _op(lost.rank, lost.op, name)
    if op is not None:
        return f"{seen} at {op}{f' (step {lost.step})' if lost.step >= 0 else ''}"
    return f"{seen} {f'between steps, after step {lost.step}' if lost.step >= 0 else 'before its first step'}"


def _details(lost: Lost, deadline_s: float) -> str:
    still_s = lost.still_ms / 1000
    match lost.kind:
        case LossKind.RAISED:
            text = lost.text.partition(":")[2].strip()
            return f": {text}{'' if text.endswith('.') else '.'}" if text else "."
        case LossKind.LEFT:
            return ". If its log shows no error, do all ranks run the same number of steps?"
        case LossKind.HUNG if lost.text:
            return f": ranks {lost.text} wait for each other; does `treadle verify` pass?"
        case LossKind.HUNG if lost.silent:
            what = "stopped, or its interpreter blocked"
            return f", without a sign of life for {still_s:.1f} s: {what}.{short_of_cores()}"
        case LossKind.HUNG:
            way_out = f"If it was only slow, give more than {deadline_s:g} s."
            return f", where it had been for {still_s:.1f} s. {way_out}{short_of_cores()}"
        case _:
            return "."
