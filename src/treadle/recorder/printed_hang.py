"""A hang as `treadle hang --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Count, OneOf

CAUSES = {
    "stopped": "a host that had all that it needs, and launched nothing more",
    "no-dump": "a rank that the others wait for, and that left no dump",
    "old-dump": "a rank that the others wait for, and whose dump is older than theirs",
    "order": "a rank that launched in another order than the schedule's",
    "circle": "ops that wait for each other on shared communicators",
    "in-flight": "a message that is launched at both ends, with nothing before it",
    "outside": "nothing: every message of the step has ended",
}
"""What a hang can have as its cause."""


class WaitJson(TypedDict):
    """What a rank waits for."""

    rank: Annotated[Count, "The rank, by its place in the pipeline."]
    chain: Annotated[list[str], "What waits for what, each for the next, to the cause; empty if the rank is it."]


class PipelineJson(TypedDict):
    """One pipeline."""

    cause: Annotated[str, OneOf(tuple(CAUSES)), "The kind of cause."]
    sentence: Annotated[str, "The cause in a sentence."]
    group: Annotated[str, "The process group of the pipeline, as its dumps name it."]
    ranks: Annotated[list[Count], "The ranks of the run, in the order of the pipeline."]
    at_fault: Annotated[list[Count], "The ranks that are the cause, by their places in the pipeline."]
    step: Annotated[Count | None, "The number of the step, from 0; null where a buffer has lost its beginning."]
    ops: Annotated[list[str], "The ops at which the cause is, as the schedule names them."]
    circle: Annotated[list[str], "The ops that wait for each other, each for the next."]
    waits: Annotated[list[WaitJson], "Each rank that waits."]


class HangJson(TypedDict):
    """`treadle hang`."""

    schedule: Annotated[str, "The name of the schedule."]
    dumps: Annotated[list[Count], "The ranks of the run that left a dump which could be placed."]
    communicators: Annotated[str, OneOf(("channel", "direction", "pair", "group")), "Which channels share one."]
    pipelines: Annotated[list[PipelineJson], "Each pipeline of the run; those with a cause first."]
    remarks: Annotated[list[str], "What could not be read, or was set aside."]
