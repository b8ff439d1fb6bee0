"""The phases of a replica's gate, as a table.

    OPEN ──SHUT──> DRAINING ──DRAINED──> CLOSED ──READY──> STARTING ──OPENED, GAVE_UP──> OPEN
     ^                │                                       │
     └──NOT_DRAINED───┘<──────────────────SHUT────────────────┘

`OPEN` means that the next Shut has to drain and pause. It does not mean that the gate is open: a new replica and one
whose start failed are in this phase too, with the gate closed.
"""

from __future__ import annotations

from enum import Enum, auto


class GatePhase(Enum):
    """Where a replica is between two openings of its gate."""

    OPEN = auto()
    """Nothing is under way. Requests pass if the gate is open."""
    DRAINING = auto()
    """One worker's Shut drains requests and pauses the scheduler; other workers' Shut waits for it."""
    CLOSED = auto()
    """Requests are through and the scheduler is paused; another Shut is answered at once."""
    STARTING = auto()
    """All workers are ready for one version; the engine resumes and the canary is asked."""


class GateEvent(Enum):
    """What moves a replica from phase to phase."""

    SHUT = auto()
    """A worker asks to let nobody in. It cancels a start that is under way."""
    DRAINED = auto()
    """Requests are through, and the scheduler is paused."""
    NOT_DRAINED = auto()
    """Requests did not end in time, or vLLM did not pause."""
    READY = auto()
    """The last worker is ready to serve the version that all others are ready for."""
    OPENED = auto()
    """The start succeeded: the gate is open."""
    GAVE_UP = auto()
    """The start failed or took too long; it opens nothing any more."""


TRANSITIONS: dict[tuple[GatePhase, GateEvent], GatePhase] = {
    (GatePhase.OPEN, GateEvent.SHUT): GatePhase.DRAINING,
    (GatePhase.OPEN, GateEvent.READY): GatePhase.STARTING,  # of a new replica, or after a start that gave up
    (GatePhase.DRAINING, GateEvent.SHUT): GatePhase.DRAINING,
    (GatePhase.DRAINING, GateEvent.DRAINED): GatePhase.CLOSED,
    (GatePhase.DRAINING, GateEvent.NOT_DRAINED): GatePhase.OPEN,
    (GatePhase.DRAINING, GateEvent.READY): GatePhase.STARTING,
    (GatePhase.CLOSED, GateEvent.SHUT): GatePhase.CLOSED,
    (GatePhase.CLOSED, GateEvent.READY): GatePhase.STARTING,
    (GatePhase.STARTING, GateEvent.SHUT): GatePhase.DRAINING,
    (GatePhase.STARTING, GateEvent.READY): GatePhase.STARTING,  # a later start takes the place of the one before
    (GatePhase.STARTING, GateEvent.OPENED): GatePhase.OPEN,
    (GatePhase.STARTING, GateEvent.GAVE_UP): GatePhase.OPEN,
}
"""The phase after an event. Events that are not here cannot happen in that phase."""


def after(phase: GatePhase, event: GateEvent) -> GatePhase:
    """Return the next phase. Raises KeyError for an event that has no place in this phase."""
    return TRANSITIONS[phase, event]
