"""All that one rank knows of a loss, and when it has settled. No sockets, no threads; the time is passed in.

What is seen is told at once; what a rank concludes is told by it alone, the one that asked, so that no two ranks
conclude differently from answers that came in a different order. Every rank then waits a moment for other reports that
are under way, and takes the first.

    a neighbour's death, an error       Lost ------------------------> settle -> verdict
    a wait that failed    Ask -> States -> (for the silent) -> Lost --> settle -> verdict
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from treadle.runtime.faults.watch.diagnosis import culprit, first
from treadle.runtime.faults.watch.messages import (
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
"""How long other reports are waited for after the first."""

SPEAK_S = 0.4
"""How long a rank has to answer before its neighbours speak for it."""

DECIDE_S = 0.8
"""How long the one that asked collects answers."""

STALE_S = 1.0
"""After that an ask of another, that came to nothing, does not keep a rank from asking itself."""


class Surroundings(Protocol):
    """What a rank sees by itself."""

    def own(self) -> Observation:
        """What this rank is doing."""

    def neighbours(self) -> Iterable[Observation]:
        """What its neighbours were last seen doing; SILENT unless they left."""


@dataclass
class _Inquiry:
    ask: StateRequest
    began: float
    states: dict[int, Observation] = field(default_factory=dict)
    spoke: bool = False
    decided: bool = False


class Incident:
    """What rank `rank` knows. `spread` sends a message to all neighbours."""

    def __init__(self, rank: int, surroundings: Surroundings, spread: Callable[[Flooded], None]) -> None:
        self.rank, self._surroundings, self._spread = rank, surroundings, spread
        self.reports: list[Lost] = []
        self.verdict: Lost | None = None
        self._settle_at = math.inf
        self._inquiries: dict[tuple[int, int], _Inquiry] = {}
        self._seen: set[tuple[type, int, int]] = set()
        self._seq = 0

    def lose(
        self,
        kind: LossKind,
        sight: Observation,
        now: float,
        *,
        text: str = "",
        silent: bool = False,
        secondhand: bool = False,
    ) -> None:
        """Tells everyone that the rank seen here is lost."""
        told = (sight.op, sight.step, time.time_ns(), sight.still_ms, sight.exact)
        self._tell(Lost(self.rank, self._next(), sight.rank, kind, *told, silent, secondhand, text), now)

    def ask(self, cause: WaitFailure, now: float) -> None:
        """Asks everyone what they are doing, unless it is known, or another has just asked."""
        under_way = any(now - inquiry.began < STALE_S for inquiry in self._inquiries.values())
        if not self.reports and not under_way:
            self._tell(StateRequest(self.rank, self._next(), cause), now)

    def hear(self, message: Flooded, now: float) -> bool:
        """Takes note of a message; False if it is known already, so that it goes no further."""
        key = (type(message), message.origin, message.seq)
        if key in self._seen:
            return False
        self._seen.add(key)
        match message:
            case Lost():
                self.reports.append(message)
                self._settle_at = min(self._settle_at, now + SETTLE_S)
            case StateRequest(origin, seq):
                self._inquiries.setdefault((origin, seq), _Inquiry(message, now))
                self._tell(StateReply(self.rank, self._next(), (origin, seq), self._surroundings.own()), now)
            case StateReply(ask=ask, sight=sight) if ask in self._inquiries:
                states = self._inquiries[ask].states
                if sight.rank not in states or _better(sight, states[sight.rank]):
                    states[sight.rank] = sight
        return True

    def turn(self, now: float) -> None:
        """Does what is due."""
        for inquiry in list(self._inquiries.values()):
            if not inquiry.spoke and now >= inquiry.began + SPEAK_S:
                inquiry.spoke = True
                self._speak_for_neighbours(inquiry, now)
            if not inquiry.decided and now >= inquiry.began + DECIDE_S:
                inquiry.decided = True
                self._decide(inquiry, now)
        if self.verdict is None and now >= self._settle_at:
            self.verdict = first(self.reports)

    def due(self) -> float:
        """When something is due next."""
        times = [self._settle_at if self.verdict is None else math.inf]
        for inquiry in self._inquiries.values():
            times += [inquiry.began + SPEAK_S] * (not inquiry.spoke)
            times += [inquiry.began + DECIDE_S] * (not inquiry.decided)
        return min(times)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _tell(self, message: Flooded, now: float) -> None:
        self._spread(message)
        self.hear(message, now)

    def _speak_for_neighbours(self, inquiry: _Inquiry, now: float) -> None:
        for sight in self._surroundings.neighbours():
            if sight.rank not in inquiry.states or _better(sight, inquiry.states[sight.rank]):
                ask = (inquiry.ask.origin, inquiry.ask.seq)
                self._tell(StateReply(self.rank, self._next(), ask, sight), now)

    def _decide(self, inquiry: _Inquiry, now: float) -> None:
        if inquiry.ask.origin != self.rank or self.reports:
            return
        finding = culprit(self.rank, inquiry.ask.cause, inquiry.states)
        if finding is not None:
            silent = finding.sight.condition is Condition.SILENT
            self.lose(finding.kind, finding.sight, now, text=finding.text, silent=silent)


def _better(new: Observation, old: Observation) -> bool:
    """An answer of its own is better than a neighbour's word, and the page better than the last heartbeat."""
    return (new.condition is not Condition.ANSWERS, not new.exact) < (
        old.condition is not Condition.ANSWERS,
        not old.exact,
    )
