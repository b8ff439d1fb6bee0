"""Why a measured run is slow, in numbers: slowdowns by kind of op, stage, replica and step, and the cause.

    S        the steps without gaps, to the ideal step
    by_...   a step with only these ops as they were measured and all others ordinary, to the ideal step
    score    of a worker: the lower of the slowdowns of its replica and its rank of the pipeline
    M_S, M_W the share of the lost time that comes back when the last stage, or the slowest 3 % of workers, is ordinary

as in "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.diagnosis.cause import NO_STRAGGLERS, StragglerCause, name_cause
from treadle.diagnosis.suspects import Suspects
from treadle.diagnosis.whatif import WhatIf
from treadle.ir.program import Bools
from treadle.ir.show import show_time
from treadle.ir.steps import Steps
from treadle.ir.trace import Clock

if TYPE_CHECKING:
    from treadle.diagnosis.printed_why import WhyJson

SHARE_OF_WORKERS = 3
"""Percent of the workers, rounded up, that M_W makes ordinary."""


@dataclass(frozen=True)
class Recovered:
    """Chosen ops made ordinary recover the share `removed` of the lost time; alone as measured they cause `added`."""

    removed: float
    added: float


@dataclass(frozen=True)
class WhyReport:
    """Times are means over the steps, in ticks of the clock; `shortest` and `longest` are of steps as measured.

    `workers[dp][pp]` are scores. `shares` are those of the measured step that each cause costs, the largest first.

    `gaps` is the share of the measured time between ops and what they wait for; `messages` and `communication` are the
    shares of the time without gaps that go when messages, or all communication, take no time.
    """

    about: str
    clock: Clock
    pp: int
    dp: int
    num_mb: int
    measured: float
    shortest: float
    longest: float
    no_gaps: float
    ideal: float
    slowdown: float
    by_kind: dict[str, float]
    by_stage: tuple[float, ...]
    by_dp: tuple[float, ...]
    by_step: dict[int, float]
    workers: tuple[tuple[float, ...], ...]
    slowest: tuple[tuple[int, int], ...]
    last_stage: Recovered
    slowest_workers: Recovered
    recovered: dict[str, float]
    shares: dict[str, float]
    between: float
    gaps: float
    messages: float
    communication: float
    cause: StragglerCause

    @property
    def in_words(self) -> str:
        """The times and sizes in a sentence."""
        stages = len(self.by_stage)
        chunks = f"{stages} stages" + (f" on {self.pp} ranks" if stages > self.pp else "")
        steps, replicas = len(self.by_step), f" x {self.dp} replicas" if self.dp > 1 else ""
        return (
            f"a step takes {show_time(self.clock, self.measured)}{self._range} to the begin of the next, "
            f"{self.between:.1%} of it between steps; "
            f"{show_time(self.clock, self.no_gaps)} without gaps between ops ({self.gaps:.1%}), "
            f"{show_time(self.clock, self.ideal)} with every op at the mean or median of its type; "
            f"waiting for messages {self.messages:.1%}, exposed communication {self.communication:.1%}; "
            f"{chunks}{replicas}, {self.num_mb} micro-batches, {steps} step{'s' if steps > 1 else ''}"
        )

    @property
    def _range(self) -> str:
        if len(self.by_step) < 2:
            return ""
        return f" ({show_time(self.clock, self.shortest)} to {show_time(self.clock, self.longest)})"

    def as_dict(self) -> WhyJson:
        """Return a dict for JSON; times are in the clock's unit."""
        show = self.clock.show
        return {
            "about": self.about,
            "unit": self.clock.unit,
            "size": {"pp": self.pp, "dp": self.dp, "microbatches": self.num_mb, "steps": len(self.by_step)},
            "S": self.slowdown,
            "times": {
                "measured": show(self.measured),
                "shortest": show(self.shortest),
                "longest": show(self.longest),
                "no_gaps": show(self.no_gaps),
                "ideal": show(self.ideal),
            },
            "cause": self.cause.as_dict(),
            "by_kind": self.by_kind,
            "by_stage": list(self.by_stage),
            "by_dp": list(self.by_dp),
            "by_step": [{"step": number, "S": slowdown} for number, slowdown in self.by_step.items()],
            "workers": [list(row) for row in self.workers],
            "slowest": [{"dp": dp, "pp": place} for dp, place in self.slowest],
            "M_S": self.last_stage.removed,
            "M_W": self.slowest_workers.removed,
            "added": {"M_S": self.last_stage.added, "M_W": self.slowest_workers.added},
            "recovered": self.recovered,
            "shares": self.shares,
            "between": self.between,
            "gaps": self.gaps,
            "messages": self.messages,
            "communication": self.communication,
        }


def analyse(steps: Steps, whatif: WhatIf | None = None) -> WhyReport:
    """Say what measured steps are slowed down by; `whatif` is that of the steps, where the caller has it.

    Raises:
        ValueError: the steps are of a weight update, or their program does not finish.

    """
    whatif = whatif if whatif is not None else WhatIf.of(steps)
    layout = steps.program.layout
    pp, dp = layout.placement.pp, layout.num_replicas
    num_stages = layout.placement.num_stages
    by_stage = tuple(whatif.slowdown(whatif.only(whatif.stage == stage)) for stage in range(num_stages))
    by_place = tuple(whatif.slowdown(whatif.only(whatif.place == place)) for place in range(pp))
    by_dp = tuple(whatif.slowdown(whatif.only(whatif.replica == replica)) for replica in range(dp))
    scores = np.minimum(np.array(by_dp)[:, None], np.array(by_place)[None, :])
    slowest = _slowest(scores)
    chosen = np.zeros(steps.program.num_ops, bool)
    for replica, place in slowest:
        chosen |= (whatif.replica == replica) & (whatif.place == place)
    suspects = Suspects(steps, whatif)
    stragglers = [suspect for suspect in suspects.all if suspect.what not in NO_STRAGGLERS]
    took, measured = whatif.no_gaps, steps.periods
    return WhyReport(
        about=steps.about,
        clock=steps.clock,
        pp=pp,
        dp=dp,
        num_mb=layout.num_microbatches,
        measured=float(measured.mean()),
        shortest=float(measured.min()),
        longest=float(measured.max()),
        no_gaps=float(took.mean()),
        ideal=whatif.ideal,
        slowdown=whatif.slowdown(took),
        by_kind={name: whatif.slowdown(whatif.only(ops)) for name, ops in whatif.types.items()},
        by_stage=by_stage,
        by_dp=by_dp,
        by_step={number: whatif.slowdown(took[[at]]) for at, number in enumerate(steps.numbers)},
        workers=tuple(tuple(map(float, row)) for row in scores),
        slowest=slowest,
        last_stage=_recovered(whatif, whatif.stage == num_stages - 1),
        slowest_workers=_recovered(whatif, chosen),
        recovered={suspect.what: suspects.recovered(suspect) for suspect in stragglers},
        shares={suspect.what: suspect.share for suspect in suspects.all},
        between=_lost(measured.mean(), steps.makespans.mean()),
        gaps=_lost(steps.makespans.mean(), took.mean()),
        messages=_lost(took.mean(), whatif.free(whatif.is_message).mean()),
        communication=_lost(took.mean(), whatif.free(whatif.communicates).mean()),
        cause=name_cause(suspects),
    )


def _slowest(scores: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[tuple[int, int], ...]:
    """The workers of the highest scores, as (dp, pp); of equal ones the lowest rank, which counts pp by pp."""
    num = -(-scores.size * SHARE_OF_WORKERS // 100)
    ranked = np.argsort(-scores.T.reshape(-1), kind="stable")[:num]
    dp = scores.shape[0]
    return tuple((int(rank % dp), int(rank // dp)) for rank in ranked)


def _recovered(whatif: WhatIf, chosen: Bools) -> Recovered:
    lost = whatif.no_gaps.mean() - whatif.ideal
    added = float((whatif.only(chosen).mean() - whatif.ideal) / lost) if lost else 0.0
    return Recovered(whatif.recovered(whatif.without(chosen)), added)


def _lost(whole: float, rest: float) -> float:
    return float(1 - rest / whole) if whole else 0.0
