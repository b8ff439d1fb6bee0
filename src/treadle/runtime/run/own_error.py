"""Where a rank's own error happened: a note with the rank, the step, the op, and the ops around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from treadle.ir.program import Op
from treadle.runtime.faults.guard import Guard
from treadle.runtime.faults.watch import RankLostError

AROUND = 3
"""Ops shown before and after the one that failed."""


def blame(guard: Guard, error: Exception, op: Op, peer: int, own: Sequence[Op], rank: int) -> NoReturn:
    """Raise what the error of an op comes to, with a note if it is this rank's own. The op waited for `peer`.

    `own` are the rank's ops in the order in which it launches them.
    """
    try:
        guard.blame(error, op.index, peer)
    except Exception as raised:
        if raised is error and not isinstance(error, RankLostError):
            at = own.index(op)
            names = [str(other) for other in own[max(0, at - AROUND) : at + AROUND + 1]]
            error.add_note(pointed(names, min(at, AROUND), f"rank {rank}, step {guard.slots[2]}, at {op}"))
        raise


def pointed(names: Sequence[str], at: int, title: str) -> str:
    """Return a title, the names in a row, and carets beneath `names[at]`."""
    indent = "    "
    before = "".join(f"{name}, " for name in names[:at])
    return "\n".join((title, indent + ", ".join(names), indent + " " * len(before) + "^" * len(names[at])))
