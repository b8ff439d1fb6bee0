"""Why a run is slow as `treadle why --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, Count, CountFrom1, OneOf
from treadle.ir.printed_peak import TimeUnit


class SlowCauseJson(TypedDict):
    """A cause as it is printed."""

    what: Annotated[
        str,
        OneOf(
            (
                "none",
                "several",
                "between",
                "gaps",
                "pauses",
                "steps",
                "microbatches",
                "stage",
                "rank",
                "stage or rank",
                "worker",
                "replica",
                "communication",
            )
        ),
        "none: nothing costs 5 % of a step; several: nothing recovers 30 % of the time lost to stragglers; stage or "
        "rank: times alone do not separate the stage's layers from its machine; else what costs a step most.",
    ]
    stage: Annotated[int | None, "The stage."]
    pp: Annotated[int | None, "The worker's rank of the pipeline."]
    dp: Annotated[int | None, "The replica, or the worker's replica."]
    recovers: Annotated[
        float,
        "The share of the time lost to stragglers that it recovers, above 1 where a step without it is faster than the "
        "ideal one; of between, gaps and steps, their share of the measured step.",
    ]
    sentence: Annotated[str, "The cause, and what to do."]


class RunSizeJson(TypedDict):
    """The sizes of a run as they are printed."""

    pp: Annotated[CountFrom1, "Stages: ranks of a pipeline."]
    dp: Annotated[CountFrom1, "Replicas of the pipeline."]
    microbatches: Annotated[CountFrom1, "Micro-batches of a step, over all pipes."]
    steps: Annotated[CountFrom1, "Steps that were analysed."]


class RunTimesJson(TypedDict):
    """The times of a run as they are printed."""

    measured: Annotated[Amount, "From the begin of a step to the begin of the next one."]
    shortest: Annotated[Amount, "The shortest step, as measured."]
    longest: Annotated[Amount, "The longest step, as measured."]
    no_gaps: Annotated[Amount, "Simulated with the measured durations: no time between an op and what it waits for."]
    ideal: Annotated[Amount, "Simulated with every op of the duration of its type."]


class StepSlowdownJson(TypedDict):
    """A step's slowdown as it is printed."""

    step: Annotated[int, "Its number in the run."]
    S: Annotated[Amount, "Its slowdown."]


class WorkerJson(TypedDict):
    """A worker as it is printed."""

    dp: Annotated[Count, "Its replica."]
    pp: Annotated[Count, "Its rank of the pipeline."]


class AddedJson(TypedDict):
    """Shares of the lost time as they are printed."""

    M_S: Annotated[float, "The last stage."]
    M_W: Annotated[float, "The slowest workers."]


class WhyJson(TypedDict):
    """A report as it is printed."""

    about: Annotated[str, "Where the steps were measured."]
    unit: TimeUnit
    size: Annotated[RunSizeJson, "The sizes of the run."]
    S: Annotated[Amount, "The slowdown: the time without gaps, to the ideal time."]
    times: Annotated[RunTimesJson, "Means over the steps."]
    cause: Annotated[
        SlowCauseJson,
        "What costs a step most: gaps, steps that differ, or what recovers most of the lost time at its baseline.",
    ]
    by_kind: Annotated[
        dict[str, Amount],
        "By kind of op; sends and receives of a direction are one kind. How much longer a step takes with only "
        "these ops as measured and all others at their baseline, as a ratio.",
    ]
    by_stage: Annotated[
        list[Amount],
        "By stage. How much longer a step takes with only these ops as measured and all others at their baseline, "
        "as a ratio.",
    ]
    by_dp: Annotated[
        list[Amount],
        "By replica. How much longer a step takes with only these ops as measured and all others at their "
        "baseline, as a ratio.",
    ]
    by_step: Annotated[list[StepSlowdownJson], "The slowdown of each step."]
    workers: Annotated[
        list[list[Amount]],
        "A row for each replica: the score of its worker on each rank of the pipeline, the lower of the slowdowns "
        "of replica and rank.",
    ]
    slowest: Annotated[list[WorkerJson], "The workers of the highest scores, 3 % of all, rounded up."]
    M_S: Annotated[float, "The share of the lost time recovered by the last stage at its baseline."]
    M_W: Annotated[float, "The share of the lost time recovered by the slowest workers at their baseline."]
    added: Annotated[AddedJson, "The share of the lost time that these alone cause, as measured."]
    recovered: Annotated[
        dict[str, float],
        "The share of the lost time recovered without each of these: microbatches, pauses, stage, rank, worker, "
        "replica, communication. Above 1 where a step without it is faster than the ideal one.",
    ]
    shares: Annotated[
        dict[str, float],
        "The share of the measured step that each costs, the largest first: between (from the end of a step to the "
        "begin of the next one), gaps, steps (all as long as the median step), and the stragglers.",
    ]
    between: Annotated[float, "The share of the measured time from the end of a step to the begin of the next one."]
    gaps: Annotated[float, "The share of a step from begin to end between ops and what they wait for."]
    messages: Annotated[float, "The share of the time without gaps that goes when messages take no time."]
    communication: Annotated[float, "The share of the time without gaps that goes when no communication takes time."]
