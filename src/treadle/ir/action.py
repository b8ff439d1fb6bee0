"""Actions and cells: the letters a schedule is written in.

F3.1            forward of micro-batch 3 through chunk 1
B3.1            its whole backward
I3.1, W3.1      the backward in two: dgrad (input gradient) and wgrad (weight gradient)
(F4.1|B3.1)     one overlapped cell: a forward and a backward that run together
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias


class Kind(IntEnum):
    """The work of an action. The name is the letter, the value is what columns hold.

    Example:
        >>> Kind["F"].value
        0

    """

    F = 0
    B = 1
    I = 2
    W = 3


class Action(NamedTuple):
    """One kind of work on one micro-batch in one of a rank's chunks.

    Example:
        >>> str(Action(Kind.F, 3, 1))
        'F3.1'

    """

    kind: Kind
    mb: int
    chunk: int

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of this cell, itself: an Action is the simplest Cell."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.kind.name}{self.mb}.{self.chunk}"

    def __or__(self, backward: Action) -> Pair:
        if (self.kind, backward.kind) != (Kind.F, Kind.B):
            raise ValueError(f"a pair is a forward and a whole backward, F | B, got {self} | {backward}")
        return Pair(self, backward)


class Pair(NamedTuple):
    """An overlapped cell: a forward and a whole backward that start and end together.

    Example:
        >>> str(Pair(F(4, 1), B(3, 1)))
        '(F4.1|B3.1)'

    """

    forward: Action
    backward: Action

    @property
    def actions(self) -> tuple[Action, ...]:
        """Forward first, as it is written."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward}|{self.backward})"


Cell: TypeAlias = Action | Pair


def F(mb: int, chunk: int = 0) -> Action:
    """Return the forward of a micro-batch in a chunk.

    Args:
        mb: the micro-batch, numbered from 0 in its pipe.
        chunk: the rank's own number of the stage; in DualPipe the direction.

    Example:
        >>> str(F(3, 1))
        'F3.1'

    """
    return Action(Kind.F, mb, chunk)


def B(mb: int, chunk: int = 0) -> Action:
    """Return the whole backward of a micro-batch in a chunk.

    Args:
        mb: the micro-batch, numbered from 0 in its pipe.
        chunk: the rank's own number of the stage; in DualPipe the direction.

    Example:
        >>> str(B(3, 1))
        'B3.1'

    """
    return Action(Kind.B, mb, chunk)


def I(mb: int, chunk: int = 0) -> Action:
    """Return the dgrad of the backward of a micro-batch in a chunk.

    Args:
        mb: the micro-batch, numbered from 0 in its pipe.
        chunk: the rank's own number of the stage; in DualPipe the direction.

    Example:
        >>> str(I(3, 1))
        'I3.1'

    """
    return Action(Kind.I, mb, chunk)


def W(mb: int, chunk: int = 0) -> Action:
    """Return the wgrad of the backward of a micro-batch in a chunk.

    Args:
        mb: the micro-batch, numbered from 0 in its pipe.
        chunk: the rank's own number of the stage; in DualPipe the direction.

    Example:
        >>> str(W(3, 1))
        'W3.1'

    """
    return Action(Kind.W, mb, chunk)
