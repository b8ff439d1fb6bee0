"""Steps, critical paths and comparisons as `treadle simulate` and `treadle compare` print them with --json."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, Count, Text
from treadle.ir.printed_peak import PeakJson, TimeUnit


class CoverJson(TypedDict):
    """The time of some lanes of a rank as it is printed."""

    hidden: Annotated[Amount, "Time while the rank computes, in unit."]
    exposed: Annotated[Amount, "Time while it does not, in unit."]


class RankJson(TypedDict):
    """A rank's numbers as they are printed."""

    busy: Annotated[Amount, "Time computing, in unit."]
    span: Annotated[Amount, "Time from its first compute to its last, in unit."]
    idle: Annotated[Amount, "Time of the makespan in which it does not compute, in unit."]
    bubble: Annotated[Amount, "Its idle share of the makespan, from 0 to 1."]
    communication: Annotated[CoverJson, "Time of communication."]
    copies: Annotated[CoverJson, "Time of copies between device and host."]


class MetricsJson(TypedDict):
    """A step in numbers as it is printed."""

    unit: TimeUnit
    makespan: Annotated[Amount, "Time from the first start to the last end, in unit."]
    bubble: Annotated[Amount, "The idle share of the rank with the longest span, in that span, from 0 to 1."]
    exposed: Annotated[Amount, "Communication that no compute hides, on a rank on average, in unit."]
    num_ops: Annotated[Count, "Ops of all ranks."]
    ranks: Annotated[list[RankJson], "A row for each rank."]
    peak: Annotated[PeakJson, "Activations held at most."]


class PathJson(TypedDict):
    """A critical path as it is printed."""

    unit: TimeUnit
    num_ops: Annotated[Count, "The ops on the path."]
    length: Annotated[Amount, "Time from the first start to the last end, in unit."]
    by_kind: Annotated[dict[str, float], "Time on the path by kind of op, in unit; fb is an overlapped pair."]
    by_lane: Annotated[dict[str, float], "Time on the path by kind of lane, in unit."]
    by_rank: Annotated[
        dict[Annotated[str, Text("^[0-9]+$")], float],
        "Time on the path by rank, in unit, in the order of the first visits.",
    ]
    num_hops: Annotated[Count, "How often the path goes on to another rank."]
    gaps: Annotated[Amount, "Time in which no op on the path ran, in unit; a prediction has none."]
    num_gaps: Annotated[Count, "The number of such gaps."]


class SizeJson(TypedDict):
    """The sizes of a step as they are printed."""

    layers: Annotated[Count | None, "Layers of the model; null where not known."]
    ranks: Annotated[Count, "Ranks."]
    microbatches: Annotated[Count, "Micro-batches of a step, over all pipes."]


class DeltaJson(TypedDict):
    """The difference of a group's ops as it is printed."""

    median: Annotated[float, "Over the group's ops, in unit."]
    mean: Annotated[float, "Over the group's ops, in unit."]
    total: Annotated[float, "Over the group's ops, in unit."]


class GroupJson(TypedDict):
    """Ops that are alike as they are printed."""

    name: Annotated[str, "The group in words."]
    kind: Annotated[str | None, "The kind of op; null where the group is not by kind."]
    rank: Annotated[Count | None, "The rank; null where the group is not by rank."]
    num_ops: Annotated[Count, "Ops of the group; an overlapped pair counts once."]
    duration: Annotated[DeltaJson, "Second trace less first, of durations."]
    start: Annotated[DeltaJson, "Second trace less first, of starts, each from its trace's first one."]
    ratio: Annotated[Amount | None, "Total duration, second to first; null where the first is 0."]


class CauseJson(GroupJson):
    """A cause as it is printed."""

    share: Annotated[Amount, "Its share of all differences between groups, however signed, from 0 to 1."]


class OutlierJson(TypedDict):
    """An outlier as it is printed."""

    op: Annotated[Count, "The op's index in the program."]
    rank: Annotated[Count, "Its rank."]
    label: Annotated[str, "The op in words."]
    first: Annotated[Amount, "Its duration in the first trace, in unit."]
    second: Annotated[Amount, "Its duration in the second trace, in unit."]
    ratio: Annotated[Amount, "Second to first."]
    usual: Annotated[Amount, "The median of that ratio over the op's kind."]
    score: Annotated[
        Amount | None,
        "How far the ratio is from the usual one, in spreads of its kind; null where it is past all numbers.",
    ]


class DifferenceJson(TypedDict):
    """Two traces op by op as they are printed."""

    by_kind: Annotated[list[GroupJson], "Ops by kind."]
    by_lane: Annotated[list[GroupJson], "Ops by kind of lane."]
    by_rank: Annotated[list[GroupJson], "Ops by rank."]
    causes: Annotated[
        list[CauseJson],
        "Groups by kind and rank that make most of the difference in total duration, largest first.",
    ]
    outliers: Annotated[list[OutlierJson], "Ops that differ otherwise than their kind, farthest first."]


class VersusJson(TypedDict):
    """A number beside the first row's as it is printed."""

    value: Annotated[Amount, "The value: a time in unit, or a share from 0 to 1."]
    difference: Annotated[float, "This row's less the first row's."]
    ratio: Annotated[Amount | None, "This row's to the first row's; null where the first row's is 0."]


class ComparedJson(TypedDict):
    """A row of a comparison as it is printed."""

    name: Annotated[str, "The schedule or file, as given."]
    bubble: Annotated[VersusJson, "The idle share of the rank with the longest span, in that span."]
    size: Annotated[SizeJson, "The sizes of the step."]
    peak: Annotated[PeakJson, "Activations held at most."]
    makespan: Annotated[VersusJson, "Time from the first start to the last end."]
    exposed: Annotated[VersusJson, "Communication that no compute hides, on a rank on average."]


class CompareJson(TypedDict):
    """A comparison as it is printed."""

    unit: TimeUnit
    held: Annotated[str, "The sizes that all rows have in common, and those that they do not, in a sentence."]
    rows: Annotated[
        list[ComparedJson],
        "A row for each thing compared; the first one is what the others are held against.",
    ]
    ops: Annotated[
        DifferenceJson | None,
        "Two traces of one program op by op; null where there are not two, or their programs differ.",
    ]
    why_not: Annotated[str, "Why there is no comparison op by op; empty where there is one."]
