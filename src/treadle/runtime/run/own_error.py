"""Where a rank's own error happened: a note with the rank, the step, the op, and the ops around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from treadle.ir.program import Program
from treadle.runtime.faults.guard import Guard
from treadle.runtime.faults.watch import RankLostError

AROUND = 3
"""Ops shown before and after the one that failed."""


@dataclass(frozen=True)
class LaunchRow:
    """The ops of one rank in the order in which it launches them."""

    program: Program
    rank: int
    ops: Sequence[int]

    def blame(self, guard: Guard, error: Exception, op: int, peer: int) -> NoReturn:
        """Raise what the error of an op comes to, with a note if it is this rank's own. The op waited for `peer`."""
        try:
            guard.blame(error, op, peer)
        except Exception as raised:
            if raised is error and not isinstance(error, RankLostError):
                error.add_note(self.note(op, guard.slots[2]))
            raise

    def note(self, op: int, step: int) -> str:
        """Return the op's place in words, and the ops around it with carets beneath it."""
        at = self.ops.index(op)
        names = [str(self.program.op(other)) for other in self.ops[max(0, at - AROUND) : at + AROUND + 1]]
        return pointed(names, min(at, AROUND), f"rank {self.rank}, step {step}, at {self.program.op(op)}")


def pointed(names: Sequence[str], at: int, title: str) -> str:
    """Return a title, the names in a row, and carets beneath `names[at]`."""
    indent = "    "
    before = "".join(f"{name}, " for name in names[:at])
    return "\n".join((title, indent + ", ".join(names), indent + " " * len(before) + "^" * len(names[at])))
