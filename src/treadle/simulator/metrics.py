"""Metrics of a Trace: how busy each rank is, how much of its communication and copying is hidden behind compute.

A lane's ops are in time order, so the times at which a rank's lanes are busy are a merge of sorted lists, and what is
hidden is the intersection of two such lists: linear in the ops, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from treadle.ir.execute import Times
from treadle.ir.kernel import kernel
from treadle.ir.memory import in_unit, peaks
from treadle.ir.ops import COMMUNICATION, LaneKind
from treadle.ir.program import Ints, Longs, Program
from treadle.ir.show import peak_object
from treadle.ir.trace import Clock, Trace
from treadle.simulator.waiting import without_waiting

if TYPE_CHECKING:
    from treadle.simulator.printed_step import CoverJson, MetricsJson, RankJson

COPIES = (LaneKind.OUT, LaneKind.IN)
"""The lanes that move activations between device and host."""


@dataclass(frozen=True)
class Cover:
    """The time in which at least one of some lanes of a rank is busy: while it computes, and while it does not."""

    hidden: int
    exposed: int

    @property
    def total(self) -> int:
        """Hidden or not."""
        return self.hidden + self.exposed

    def as_dict(self, clock: Clock) -> CoverJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {"hidden": clock.show(self.hidden), "exposed": clock.show(self.exposed)}


@dataclass(frozen=True)
class RankMetrics:
    """One rank: `busy` computing, `span` from its first compute to its last, `idle` for the rest of the makespan."""

    busy: int
    span: int
    idle: int
    communication: Cover
    copies: Cover

    @property
    def idle_share(self) -> float:
        """The share of the makespan in which the rank does not compute."""
        return _share(self.idle, self.busy + self.idle)

    def as_dict(self, clock: Clock) -> RankJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "busy": clock.show(self.busy),
            "span": clock.show(self.span),
            "idle": clock.show(self.idle),
            "bubble": self.idle_share,
            "communication": self.communication.as_dict(clock),
            "copies": self.copies.as_dict(clock),
        }


@dataclass(frozen=True)
class Metrics:
    """A Trace in numbers; times are in ticks of the clock.

    `peaks` is what each rank holds of activations at most, in `peak_unit`: bytes; layers, each of a micro-batch, where
    the costs do not say bytes; or activations, each of a chunk and a micro-batch, where the layers of a chunk are not
    known.
    """

    makespan: int
    num_ops: int
    clock: Clock
    ranks: tuple[RankMetrics, ...]
    peaks: tuple[float, ...]
    peak_unit: str

    @property
    def bubble(self) -> float:
        """What papers publish: the idle share of the rank with the longest span (the first of them), in that span."""
        longest = max(self.ranks, key=lambda rank: rank.span, default=None)
        return _share(longest.span - longest.busy, longest.span) if longest is not None else 0.0

    @property
    def idle_share(self) -> float:
        """The share of the makespan in which a rank does not compute, mean over ranks."""
        return sum(rank.idle for rank in self.ranks) / max(1, self.makespan * len(self.ranks))

    @property
    def peak(self) -> float:
        """The most that any rank holds, in `peak_unit`."""
        return max(self.peaks, default=0)

    @property
    def exposed(self) -> float:
        """Communication that no compute hides, on a rank on average."""
        return sum(rank.communication.exposed for rank in self.ranks) / max(1, len(self.ranks))

    def as_dict(self) -> MetricsJson:
        """Return a dict for JSON; times are in the clock's unit."""
        different = {id(rank): rank for rank in self.ranks}  # ranks of a folded step share their numbers
        shown = {key: rank.as_dict(self.clock) for key, rank in different.items()}
        rows = [shown[id(rank)] for rank in self.ranks]
        return {
            "unit": self.clock.unit,
            "makespan": self.clock.show(self.makespan),
            "bubble": self.bubble,
            "exposed": self.clock.show(self.exposed),
            "num_ops": self.num_ops,
            "ranks": rows,
            "peak": peak_object(self.peaks, self.peak_unit),
        }


def measure(trace: Trace) -> Metrics:
    """Measure a trace: makespan, bubble, exposed communication and memory, over all and for each rank.

    Communication of a measured trace counts without the wait for the ranks that came late.

    Args:
        trace: predicted or measured.

    Returns:
        Metrics, in ticks of the trace's clock: `trace.clock.show(ticks)` converts to its unit.

    Raises:
        ValueError: ops of a lane are not in order of time.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), unit), unit)
        >>> round(measure(trace).bubble, 2)
        0.33

    """
    check_order(trace)
    settled = without_waiting(trace) if trace.measured else trace
    compute = _busy(settled, (LaneKind.COMPUTE,))
    busy, span, makespan = compute.total(), compute.span(), trace.makespan
    covers = [_covers(compute, _busy(settled, kinds)) for kinds in (COMMUNICATION, COPIES)]
    ranks = tuple(
        RankMetrics(int(b), int(s), makespan - int(b), *cover) for b, s, *cover in zip(busy, span, *covers, strict=True)
    )
    layout, sizes = trace.program.layout, peaks(trace.program, Times(trace.start, trace.end)).size
    held = tuple(in_unit(layout, int(size)) for size in sizes)
    return Metrics(makespan, trace.program.num_ops, trace.clock, ranks, held, layout.saved_unit)


def exposed_by(trace: Trace, lanes: Sequence[tuple[LaneKind, ...]]) -> list[float]:
    """Return for each set of lanes the ticks that neither compute nor an earlier set hides; the mean over ranks."""
    compute = _busy(trace, (LaneKind.COMPUTE,))
    found: list[float] = []
    taken: tuple[LaneKind, ...] = ()
    before = 0.0
    for kinds in lanes:
        taken = (*taken, *kinds)
        covers = _covers(compute, _busy(trace, tuple(dict.fromkeys(taken))))
        exposed = sum(cover.exposed for cover in covers) / max(1, len(covers))
        found.append(exposed - before)
        before = exposed
    return found


def check_order(trace: Trace) -> None:
    """Refuse a trace in which a lane does not do its ops in order."""
    program = trace.program
    wrong = _first_disorder(program.lane_ptr, trace.start, trace.end)
    if wrong < 0:
        return
    op, show = program.op(wrong), trace.clock.show
    times = f"{op} starts at {show(trace.start[wrong])} and ends at {show(trace.end[wrong])} {trace.clock.unit}"
    overtakes = wrong not in program.lane_ptr and trace.start[wrong] < trace.start[wrong - 1]
    before = f", but {program.op(wrong - 1)} before it at {show(trace.start[wrong - 1])}" if overtakes else ""
    raise ValueError(
        f"{op.lane}: {times}{before}; a lane's ops start in their order and end after they start: "
        "record each op when its lane comes to it"
    )


class _Intervals(NamedTuple):
    """Disjoint intervals of each rank in which something runs, in order."""

    ptr: Longs
    begin: Longs
    finish: Longs

    def total(self) -> Longs:
        """Return the total length of each rank's intervals."""
        passed: Longs = np.r_[0, np.cumsum(self.finish - self.begin)].astype(np.int64)
        return passed[self.ptr[1:]] - passed[self.ptr[:-1]]

    def span(self) -> Longs:
        """Return the time from the first begin to the last finish of each rank."""
        span = np.zeros(len(self.ptr) - 1, np.int64)
        some = np.flatnonzero(np.diff(self.ptr))
        span[some] = self.finish[self.ptr[some + 1] - 1] - self.begin[self.ptr[some]]
        return span


def _busy(trace: Trace, kinds: tuple[LaneKind, ...]) -> _Intervals:
    """When at least one of a rank's lanes of these kinds does an op that takes time. Joined ops fall together."""
    ptr, lanes = _lanes_of_ranks(trace.program, kinds)
    return _Intervals(*_union(trace.program.lane_ptr, ptr, lanes, trace.start, trace.end))


def _lanes_of_ranks(program: Program, kinds: tuple[LaneKind, ...]) -> tuple[Longs, Ints]:
    """List each rank's lanes of these kinds, compressed."""
    chosen = np.flatnonzero(np.isin(program.lane_kind, kinds))
    rank = program.lane_rank[chosen]
    count = np.bincount(rank, minlength=program.num_ranks)
    return np.r_[0, np.cumsum(count)].astype(np.int64), chosen[np.argsort(rank, kind="stable")].astype(np.int32)


def _covers(compute: _Intervals, other: _Intervals) -> list[Cover]:
    hidden, total = _common(*compute, *other), other.total()
    return [Cover(int(h), int(t - h)) for h, t in zip(hidden, total, strict=True)]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@kernel
def _first_disorder(lane_ptr: Longs, start: Longs, end: Longs) -> int:
    """The first op that ends before it starts, or starts before the one ahead of it on its lane; or -1."""
    for lane in range(len(lane_ptr) - 1):
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            if end[op] < start[op] or (op > lane_ptr[lane] and start[op] < start[op - 1]):
                return int(op)
    return -1


@kernel
def _union(lane_ptr: Longs, ptr: Longs, lanes: Ints, start: Longs, end: Longs) -> tuple[Longs, Longs, Longs]:
    """Merge the lanes of each rank. A rank has few of them, so the next op is found by looking at each one's head."""
    most = 0
    for lane in lanes:
        most += lane_ptr[lane + 1] - lane_ptr[lane]
    begin, finish = np.empty(most, np.int64), np.empty(most, np.int64)
    head = lane_ptr[:-1].copy()
    found = np.zeros(len(ptr), np.int64)
    count = 0
    for rank in range(len(ptr) - 1):
        first = count
        while True:
            best = -1
            for k in range(ptr[rank], ptr[rank + 1]):
                lane = lanes[k]
                op, last = head[lane], lane_ptr[lane + 1]
                while op < last and end[op] == start[op]:
                    op += 1
                head[lane] = op
                if op < last and (best < 0 or start[op] < start[head[best]]):
                    best = lane
            if best < 0:
                break
            op = head[best]
            head[best] += 1
            if count > first and start[op] <= finish[count - 1]:
                finish[count - 1] = max(finish[count - 1], end[op])
            else:
                begin[count], finish[count] = start[op], end[op]
                count += 1
        found[rank + 1] = count
    return found, begin[:count].copy(), finish[:count].copy()


@kernel
def _common(ptr: Longs, begin: Longs, finish: Longs, ptr2: Longs, begin2: Longs, finish2: Longs) -> Longs:
    """Return for each rank the time that is in both lists of intervals."""
    common = np.zeros(len(ptr) - 1, np.int64)
    for rank in range(len(ptr) - 1):
        i, j = ptr[rank], ptr2[rank]
        while i < ptr[rank + 1] and j < ptr2[rank + 1]:
            common[rank] += max(0, min(finish[i], finish2[j]) - max(begin[i], begin2[j]))
            if finish[i] < finish2[j]:
                i += 1
            else:
                j += 1
    return common
