"""The knowledge of one rank about a loss, as a state machine without sockets and threads; the time is passed in.

A loss that is seen is reported at once. A loss that is concluded is reported only by the rank that asked for states:
other ranks may have the replies in another order and conclude differently. Every rank then waits SETTLE_S for other
reports that are under way, and names the first loss.

    a neighbour's death, an error      Lost ----------------------------------------------> settle -> first loss
    a wait that failed                 StateRequest -> StateReply, also for silent ranks -> Lost -> settle -> first loss
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from treadle.runtime.faults.watch.diagnosis import culprit, first
from treadle.runtime.faults.watch.loss_messages import (
    Condition,
    Flooded,
    LossKind,
    Lost,
    Observation,
    StateReply,
    StateRequest,
    WaitFailure,
)

SETTLE_S = 0.25
"""How long a rank waits for other reports after the first."""

SPEAK_S = 0.4
"""How long a rank has to reply before its neighbours reply for it."""

DECIDE_S = 0.8
"""How long the rank that asked collects replies."""

STALE_S = 1.0
"""How long another rank's request that led to nothing keeps a rank from asking itself."""


class Surroundings(Protocol):
    """What a rank can observe itself."""

    def own(self) -> Observation:
        """Returns the state of this rank."""

    def neighbours(self) -> Iterable[Observation]:
        """Returns the last known states of its neighbours: SILENT, unless they left."""


@dataclass
class _Inquiry:
    request: StateRequest
    began: float
    states: dict[int, Observation] = field(default_factory=dict)


class Incident:
    """The knowledge of rank `rank`. `spread` sends a message to all neighbours."""

    def __init__(self, rank: int, surroundings: Surroundings, spread: Callable[[Flooded], None]) -> None:
        self.rank, self._surroundings, self._spread = rank, surroundings, spread
        self.reports: list[Lost] = []
        self.first_loss: Lost | None = None
        self._due: list[tuple[float, Callable[[float], None]]] = []
        self._inquiries: dict[tuple[int, int], _Inquiry] = {}
        self._seen: set[tuple[type, int, int]] = set()
        self._seq = 0

    def lose(
        self,
        kind: LossKind,
        observation: Observation,
        now: float,
        *,
        text: str = "",
        silent: bool = False,
        secondhand: bool = False,
    ) -> None:
        """Tells every rank that the observed rank is lost."""
        told = (observation.op, observation.step, time.time_ns(), observation.still_ms, observation.exact)
        self._tell(Lost(self.rank, self._next(), observation.rank, kind, *told, silent, secondhand, text), now)

    def ask(self, cause: WaitFailure, now: float) -> None:
        """Asks every rank for its state, unless a loss is known or another rank has just asked."""
        under_way = any(now - inquiry.began < STALE_S for inquiry in self._inquiries.values())
        if not self.reports and not under_way:
            self._tell(StateRequest(self.rank, self._next(), cause), now)

    def hear(self, message: Flooded, now: float) -> bool:
        """Handles a message. Returns False if it was known already and must not be passed on."""
        key = (type(message), message.origin, message.seq)
        if key in self._seen:
            return False
        self._seen.add(key)
        match message:
            case Lost():
                if not self.reports:
                    self._due.append((now + SETTLE_S, self._settle))
                self.reports.append(message)
            case StateRequest(origin, seq):
                self._inquiries[origin, seq] = inquiry = _Inquiry(message, now)
                self._due.append((now + SPEAK_S, partial(self._speak_for_neighbours, inquiry)))
                if origin == self.rank:
                    self._due.append((now + DECIDE_S, partial(self._decide, inquiry)))
                self._tell(StateReply(self.rank, self._next(), (origin, seq), self._surroundings.own()), now)
            case StateReply(request=request, observation=new) if request in self._inquiries:
                states = self._inquiries[request].states
                if new.rank not in states or _better(new, states[new.rank]):
                    states[new.rank] = new
        return True

    def turn(self, now: float) -> None:
        """Does whatever is due now."""
        due = [each for each in self._due if now >= each[0]]
        self._due = [each for each in self._due if now < each[0]]
        for _, do in due:
            do(now)

    def due(self) -> float:
        """Returns the time at which something is due next."""
        return min((at for at, _ in self._due), default=math.inf)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _tell(self, message: Flooded, now: float) -> None:
        self._spread(message)
        self.hear(message, now)

    def _speak_for_neighbours(self, inquiry: _Inquiry, now: float) -> None:
        request = (inquiry.request.origin, inquiry.request.seq)
        for seen in self._surroundings.neighbours():
            if seen.rank not in inquiry.states or _better(seen, inquiry.states[seen.rank]):
                self._tell(StateReply(self.rank, self._next(), request, seen), now)

    def _settle(self, now: float) -> None:
        del now
        self.first_loss = first(self.reports)

    def _decide(self, inquiry: _Inquiry, now: float) -> None:
        if self.reports:
            return
        found = culprit(self.rank, inquiry.request.cause, inquiry.states)
        if found is not None:
            silent = found.observation.condition is Condition.SILENT
            self.lose(found.kind, found.observation, now, text=found.text, silent=silent)


def _better(new: Observation, old: Observation) -> bool:
    """True if `new` is more direct: a rank's own reply before a neighbour's, its page before its last heartbeat."""
    return (new.condition is not Condition.ANSWERS, not new.exact) < (
        old.condition is not Condition.ANSWERS,
        not old.exact,
    )
