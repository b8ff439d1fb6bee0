"""A study of stragglers as `treadle plan --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, CountFrom1, Number, Positive, Share


class StragglerRowJson(TypedDict):
    """A schedule under stragglers as it is printed."""

    name: Annotated[str, "The schedule."]
    step_s: Annotated[Positive, "Seconds of the step without slow GPUs."]
    median_s: Annotated[Positive, "Seconds of the step with them: the median of the draws."]
    p10: Annotated[Amount, "How much longer a step is, as a share of step_s: the tenth percentile of the draws."]
    p50: Annotated[Amount, "How much longer a step is, as a share of step_s: the median of the draws."]
    p90: Annotated[Amount, "How much longer a step is, as a share of step_s: the ninetieth percentile of the draws."]
    max: Annotated[Amount, "How much longer a step is, as a share of step_s: the most of the draws."]


class StragglersJson(TypedDict):
    """A study of stragglers as it is printed."""

    share: Annotated[Share, "The share of ranks that are slow; a rank is a whole group of tensor parallelism."]
    factor: Annotated[float, Number(1), "By how much they are slower."]
    ranks: Annotated[CountFrom1, "Ranks of the mesh."]
    draws: Annotated[CountFrom1, "How often slow ranks were drawn."]
    least_slowed: Annotated[str, "The schedule with the lowest median slowdown."]
    fastest: Annotated[str, "The schedule with the shortest median step then."]
    rows: Annotated[list[StragglerRowJson], "The schedules, the chosen one first."]
