"""Two traces of one program, op by op: which kinds, lanes and ranks take longer, and which single ops stand out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from treadle.ir.ops import LaneKind
from treadle.ir.program import Bools, Ints, Longs, Program
from treadle.ir.trace import Clock, Trace
from treadle.simulator.grouping import WORK, Floats, tally, work_of
from treadle.simulator.waiting import without_waiting

if TYPE_CHECKING:
    from treadle.simulator.printed_step import DeltaJson, DifferenceJson, GroupJson, OutlierJson

MOST_OUTLIERS = 20
MOST_CAUSES = 20
EXPLAINED = 0.9
"""The share of the difference at which the list of causes is long enough."""

FAR = 3.5
"""Spreads from the median at which an op stands out: the usual cut for scores by the median absolute deviation."""

_TO_SIGMA = 1.4826  # a median absolute deviation in standard deviations, of a normal distribution
_LEAST_SPREAD = 0.01  # of the median: predictions have no spread at all, and rounding to ticks is no outlier


@dataclass(frozen=True)
class Delta:
    """Second trace less first, over the ops of a group, in ticks."""

    median: float
    mean: float
    total: int

    def as_dict(self, clock: Clock) -> DeltaJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {"median": clock.show(self.median), "mean": clock.show(self.mean), "total": clock.show(self.total)}


@dataclass(frozen=True)
class OpGroup:
    """Ops that are alike: how their durations and starts differ. `ratio` is second to first, of total durations.

    Starts count from each trace's own first one. The ratio to nothing is None. `kind` and `rank` are None for groups
    that are not by kind or by rank.
    """

    name: str
    kind: str | None
    rank: int | None
    num_ops: int
    duration: Delta
    start: Delta
    ratio: float | None

    def as_dict(self, clock: Clock) -> GroupJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "name": self.name,
            "kind": self.kind,
            "rank": self.rank,
            "num_ops": self.num_ops,
            "duration": self.duration.as_dict(clock),
            "start": self.start.as_dict(clock),
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Cause:
    """A group by kind and rank, and its share of all differences between groups, however signed."""

    group: OpGroup
    share: float


@dataclass(frozen=True)
class Outlier:
    """An op that differs otherwise than its kind: `ratio` of its durations where `usual` is the kind's median one."""

    op: int
    rank: int
    label: str
    first: int
    second: int
    ratio: float
    usual: float
    score: float

    def as_dict(self, clock: Clock) -> OutlierJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "op": self.op,
            "rank": self.rank,
            "label": self.label,
            "first": clock.show(self.first),
            "second": clock.show(self.second),
            "ratio": self.ratio,
            "usual": self.usual,
            "score": self.score if math.isfinite(self.score) else None,  # JSON has no infinity
        }


@dataclass(frozen=True)
class Difference:
    """Two traces of one program, op by op; an overlapped pair counts once.

    `by_kind_and_rank` and `causes` have the largest difference of total duration first; `causes` are those that make
    most of it. `outliers` have the farthest first.
    """

    by_kind: tuple[OpGroup, ...]
    by_lane: tuple[OpGroup, ...]
    by_rank: tuple[OpGroup, ...]
    by_kind_and_rank: tuple[OpGroup, ...]
    causes: tuple[Cause, ...]
    outliers: tuple[Outlier, ...]

    def as_dict(self, clock: Clock) -> DifferenceJson:
        """Return a dict for JSON; times are in the clock's unit. Groups that are no causes are left out."""
        return {
            "by_kind": [group.as_dict(clock) for group in self.by_kind],
            "by_lane": [group.as_dict(clock) for group in self.by_lane],
            "by_rank": [group.as_dict(clock) for group in self.by_rank],
            "causes": [{"share": cause.share, **cause.group.as_dict(clock)} for cause in self.causes],
            "outliers": [outlier.as_dict(clock) for outlier in self.outliers],
        }


def unlike(first: Program, second: Program) -> str:
    """Why two programs are not one and the same, or nothing."""
    if first is second:
        return ""
    for name, one, other in (
        ("ranks", first.num_ranks, second.num_ranks),
        ("lanes", first.num_lanes, second.num_lanes),
        ("ops", first.num_ops, second.num_ops),
    ):
        if one != other:
            return f"the programs differ: {one} and {other} {name}"
    for column in ("lane_ptr", "lane_rank", "lane_kind", "lane_peer", "kind", "mb", "chunk", "layer", "joined"):
        differ = np.flatnonzero(getattr(first, column) != getattr(second, column))
        if len(differ):
            what = "lane" if column.startswith("lane") else "op"
            return f"the programs differ: {column} of {what} {differ[0]}, and of {len(differ)} in all"
    return ""


def difference(first: Trace, second: Trace) -> Difference:
    """Second less first. The programs are one and the same (`unlike`)."""
    ops = _Ops.of(first, second)
    by_both = sorted(_groups(ops, _BY_KIND_AND_RANK), key=lambda group: -abs(group.duration.total))
    return Difference(
        by_kind=_groups(ops, _BY_KIND),
        by_lane=_groups(ops, _BY_LANE),
        by_rank=_groups(ops, _BY_RANK),
        by_kind_and_rank=tuple(by_both),
        causes=_causes(by_both),
        outliers=_outliers(first.program, ops),
    )


class _Ops(NamedTuple):
    """Columns over the ops that count: all but the second ops of pairs."""

    op: Longs
    work: Ints
    lane_kind: Ints
    rank: Ints
    first: Longs
    second: Longs
    later: Longs

    @classmethod
    def of(cls, first: Trace, second: Trace) -> _Ops:
        program = first.program
        kept: Bools = ~program.joined
        lane = program.lane_of[kept]
        one, two = (without_waiting(trace) if trace.measured else trace for trace in (first, second))
        later = _since_first(two.start) - _since_first(one.start)
        return cls(
            np.flatnonzero(kept).astype(np.int64),
            work_of(program)[kept].astype(np.int32),
            program.lane_kind[lane].astype(np.int32),
            program.lane_rank[lane],
            (one.end - one.start)[kept],
            (two.end - two.start)[kept],
            later[kept],
        )


def _since_first(start: Longs) -> Longs:
    return start - start.min() if len(start) else start


class _Grouping(NamedTuple):
    """The group of each op as a number, and what to call it: (name, kind, rank)."""

    code: Callable[[_Ops], Ints]
    call: Callable[[int], tuple[str, str | None, int | None]]


_BY_KIND = _Grouping(lambda ops: ops.work, lambda code: (WORK[code], WORK[code], None))
_BY_LANE = _Grouping(lambda ops: ops.lane_kind, lambda code: (LaneKind(code).name.lower(), None, None))
_BY_RANK = _Grouping(lambda ops: ops.rank, lambda code: (f"rank {code}", None, code))


def _kind_and_rank(code: int) -> tuple[str, str | None, int | None]:
    rank, work = divmod(code, len(WORK))
    return f"{WORK[work]} on rank {rank}", WORK[work], rank


_BY_KIND_AND_RANK = _Grouping(lambda ops: ops.rank * np.int32(len(WORK)) + ops.work, _kind_and_rank)


def _groups(ops: _Ops, grouping: _Grouping) -> tuple[OpGroup, ...]:
    code = grouping.code(ops)
    num = int(code.max(initial=-1)) + 1
    before, longer, later = (tally(code, num, v) for v in (ops.first, ops.second - ops.first, ops.later))

    def group(c: int) -> OpGroup:
        num_ops, total = int(before.num[c]), int(before.total[c])
        duration, start = (
            Delta(float(t.median[c]), float(t.total[c] / num_ops), int(t.total[c])) for t in (longer, later)
        )
        ratio = (total + duration.total) / total if total else None
        return OpGroup(*grouping.call(c), num_ops, duration, start, ratio)

    return tuple(group(int(c)) for c in np.flatnonzero(before.num))


def _causes(groups: list[OpGroup]) -> tuple[Cause, ...]:
    """The largest groups, until they make most of the difference."""
    whole = sum(abs(group.duration.total) for group in groups)
    causes: list[Cause] = []
    for group in groups[:MOST_CAUSES]:
        if not whole or sum(cause.share for cause in causes) >= EXPLAINED:
            break
        causes.append(Cause(group, abs(group.duration.total) / whole))
    return tuple(causes)


def _outliers(program: Program, ops: _Ops) -> tuple[Outlier, ...]:
    """The ops whose ratio is far from the median of their kind. Ops that took no time at first have no ratio."""
    timed = np.flatnonzero(ops.first > 0)
    work = ops.work[timed]
    ratio = ops.second[timed] / ops.first[timed]
    usual = tally(work, len(WORK), ratio).median
    score = _scores(work, ratio, usual)
    far = np.flatnonzero(score > FAR)
    worst = far[np.argsort(-score[far], kind="stable")][:MOST_OUTLIERS]

    def outlier(k: int) -> Outlier:
        index = int(ops.op[timed[k]])
        op, first, second = program.op(index), int(ops.first[timed[k]]), int(ops.second[timed[k]])
        return Outlier(
            index, op.lane.rank, str(op), first, second, float(ratio[k]), float(usual[work[k]]), float(score[k])
        )

    return tuple(outlier(int(k)) for k in worst)


def _scores(work: Ints, ratio: Floats, usual: Floats) -> Floats:
    """Return the distance of each ratio from the median of its kind, in spreads of its kind."""
    away = np.abs(ratio - usual[work])
    spread = np.maximum(_TO_SIGMA * tally(work, len(WORK), away).median, _LEAST_SPREAD * usual)
    with np.errstate(over="ignore"):  # infinitely far, where the ops of a kind have no spread at all
        scores: Floats = away / np.maximum(spread, np.finfo(np.float64).tiny)[work]
    return scores
