"""A synthesis as `treadle synthesize --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, CountFrom1, Share
from treadle.ir.printed_peak import TimeUnit


class SynthesisJson(TypedDict):
    """A synthesis as it is printed."""

    unit: TimeUnit
    makespan: Annotated[Amount, "How long the step takes, by the simulator."]
    lower_bound: Annotated[Amount, "No order of the same cells takes less."]
    gap: Annotated[Amount, "By how much the makespan is over the bound, as a share of the bound."]
    proven: Annotated[bool, "The makespan is the bound."]
    source: Annotated[str, "Where the order comes from: a schedule's name, greedy, pattern, solver or repair."]
    best_of_ours: Annotated[
        str | None,
        "The fastest generated schedule with the placement and within the limits; null if there is none.",
    ]
    best_of_ours_makespan: Annotated[Amount | None, "How long it takes."]
    gain: Annotated[Share | None, "How much less the makespan is than that, as a share of that."]
    tasks: Annotated[CountFrom1, "Forwards and backwards, or dgrads and wgrads, that were put in order."]
    seconds: Annotated[Amount, "How long the search took."]
