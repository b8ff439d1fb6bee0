"""The cause of a slow run: of the suspects that stand out by themselves, the one that costs a step most.

What costs less than 5 % of a step is no cause, and no straggler is where stragglers as a whole slow the run down by
less. A straggler that explains less than 30 % of the time lost to them does not explain it (`several`). Where times
alone do not separate two causes, both are named: a stage that is long where a pipeline has one replica may be its
layers or its machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.diagnosis.sentences import percent, sentence_of
from treadle.diagnosis.suspects import Suspect, Suspects
from treadle.ir.program import Layout

if TYPE_CHECKING:
    from treadle.diagnosis.printed_why import SlowCauseJson

SLOW = 1.05
"""S from which on a run is called slow."""

EXPLAINS = 0.3
"""The least share of the lost time that a straggler recovers."""

ALSO = 0.4
"""A second cause is printed from this share of the first one's cost on."""

NO_STRAGGLERS = ("between", "steps", "gaps")


@dataclass(frozen=True)
class StragglerCause:
    """`what` is none, several, stage or rank, or a suspect; `stage`, or `pp` and `dp`, say where.

    `recovers` is the share of the time lost to stragglers that comes back; of the others their share of the step.
    """

    what: str
    stage: int | None
    pp: int | None
    dp: int | None
    recovers: float
    sentence: str

    def as_dict(self) -> SlowCauseJson:
        """Return a dict for JSON."""
        return {
            "what": self.what,
            "stage": self.stage,
            "pp": self.pp,
            "dp": self.dp,
            "recovers": self.recovers,
            "sentence": self.sentence,
        }


def name_cause(suspects: Suspects) -> StragglerCause:
    """Choose what costs a step most, and say what to do about it."""
    whatif = suspects.whatif
    slowdown = whatif.slowdown(whatif.no_gaps)
    proven = [suspect for suspect in suspects.all if suspect.proven and suspect.share >= 1 - 1 / SLOW]
    if slowdown < SLOW:
        proven = [suspect for suspect in proven if suspect.what in NO_STRAGGLERS]
    explaining = [s for s in proven if s.what in NO_STRAGGLERS or suspects.recovered(s) >= EXPLAINS]
    if explaining:
        first, *others = explaining
        also = [s for s in others if s.share >= ALSO * first.share][:1]
        return _named(suspects, first, also)
    if slowdown < SLOW:
        much = percent(slowdown - 1) if slowdown > 1 else "nothing"
        return StragglerCause(
            "none", None, None, None, 0.0, f"nothing stands out: stragglers slow the run down by {much}"
        )
    stragglers = [suspect for suspect in suspects.all if suspect.what not in NO_STRAGGLERS and suspect.proven]
    parts = ", ".join(f"{suspect.what} {percent(suspects.recovered(suspect))}" for suspect in stragglers)
    sentence = f"no single cause: lost time recovered by fixing one at a time: {parts}"
    share = max((suspects.recovered(suspect) for suspect in stragglers), default=0.0)
    return StragglerCause("several", None, None, None, share, sentence)


def is_ambiguous(suspects: Suspects, suspect: Suspect) -> bool:
    """Say whether the stage's layers or the rank's machine may be the cause: times alone do not show which."""
    layout = suspects.whatif.program.layout
    if suspect.what == "stage":
        return layout.num_replicas == 1 and layout.placement.vpp == 1 and not _by_layers(layout, suspect)
    return suspect.what == "rank" and layout.num_replicas > 1


def _by_layers(layout: Layout, suspect: Suspect) -> bool:
    """Say whether the stage is as long as its layers, where they are known, make it."""
    if not all(layout.layers):
        return False
    expected = layout.layers[suspect.stages[0]] / float(np.median(np.delete(layout.layers, suspect.stages[0])))
    return expected > 1 and abs(suspect.ratio / expected - 1) < SLOW - 1


def _named(suspects: Suspects, suspect: Suspect, also: list[Suspect]) -> StragglerCause:
    ambiguous = is_ambiguous(suspects, suspect)
    sentence = sentence_of(suspects, suspect, ambiguous=ambiguous)
    for other in also:
        sentence += f"; also, {sentence_of(suspects, other, ambiguous=is_ambiguous(suspects, other))}"
    dp, pp = suspect.workers[0] if suspect.workers else (None, None)
    what = "stage or rank" if ambiguous else suspect.what
    if what in ("stage", "rank", "stage or rank") or suspects.whatif.program.layout.num_replicas == 1:
        dp = None
    if what in ("stage", "replica", "communication"):
        pp = None
    stage = suspect.stages[0] if what in ("stage", "stage or rank") else None
    share = suspect.share if suspect.what in NO_STRAGGLERS else suspects.recovered(suspect)
    return StragglerCause(what, stage, pp, dp, share, sentence)
