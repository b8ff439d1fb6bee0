"""Turns: the order in which a rank's host issues its cells and messages, over all its channels.

.               the next cell of its row
>1  <1          its next send to rank 1; its next receive from rank 1
+<1             the same, in one batch with the turn before it
wait>1:0        the compute stream's wait for its first send to rank 1: what is issued later starts after it

Which message that is follows from the rows and from the order of each channel: a turn adds only the order between them.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

Verb: TypeAlias = Literal[".", ">", "<", "wait>"]

_NUMBER = "(0|[1-9][0-9]{0,5})"
_TURN = re.compile(rf"(\.)|(\+?)([<>]){_NUMBER}|wait>{_NUMBER}:{_NUMBER}")


class Turn(NamedTuple):
    """One thing that a host issues: a cell, a message to or from `peer`, or the wait for the `place`-th send to it.

    Example:
        >>> str(Turn("<", 1, joined=True))
        '+<1'

    """

    verb: Verb
    peer: int = -1
    joined: bool = False
    place: int = -1

    def __str__(self) -> str:
        peer = "" if self.verb == "." else str(self.peer)
        place = f":{self.place}" if self.verb == "wait>" else ""
        return f"{'+' if self.joined else ''}{self.verb}{peer}{place}"


CELL = Turn(".")
TURNS = ". >1 <1 +>1 +<1 or wait>1:0"
"""What turns look like."""


@cache
def parse_turn(text: str) -> Turn | None:
    """Return a turn from its token, or None if it is not one."""
    match = _TURN.fullmatch(text)
    if match is None:
        return None
    if match[1]:
        return CELL
    if match[5]:
        return Turn("wait>", int(match[5]), place=int(match[6]))
    return Turn(">" if match[3] == ">" else "<", int(match[4]), bool(match[2]))
