"""The one dependency rule: what an action needs before it can start.

    F(s)        needs  F(s-1)                 the activation of the stage before
    B(s), I(s)  need   F(s), B or I(s+1)      what its forward saved; the gradient of the stage after
    W(s)        needs  I(s)                   what the dgrad kept

all of the same micro-batch, in the same pipe. Everything that asks "what waits for what" asks here. Inside a layer the
order of `ir.ops.FORWARD` and `BACKWARD` is the rule: each part needs the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

from treadle.ir.action import Action, Kind
from treadle.ir.placement import Placement


class Need(NamedTuple):
    """One of `kinds`, `step` stages along the pipe."""

    kinds: tuple[Kind, ...]
    step: int


_GRADIENT = (Kind.B, Kind.I)  # either makes the input gradient that the stage before waits for

RULE: dict[Kind, tuple[Need, ...]] = {
    Kind.F: (Need((Kind.F,), -1),),
    Kind.B: (Need((Kind.F,), 0), Need(_GRADIENT, +1)),
    Kind.I: (Need((Kind.F,), 0), Need(_GRADIENT, +1)),
    Kind.W: (Need((Kind.I,), 0),),
}


def needs(placement: Placement, rank: int, action: Action) -> list[tuple[int, tuple[Action, ...]]]:
    """List the needs of an action: for each the rank that fills it, and the actions any of which does."""
    found = []
    for need in RULE[action.kind]:
        place = placement.neighbour(rank, action.chunk, need.step)
        if place is not None:
            peer, chunk = place
            found.append((peer, tuple(Action(kind, action.mb, chunk) for kind in need.kinds)))
    return found
