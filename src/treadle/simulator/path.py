"""The critical path: the chain of ops that made the last one end when it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from treadle.ir.kernel import kernel
from treadle.ir.ops import LaneKind
from treadle.ir.program import Bools, Bytes, Ints, Longs
from treadle.ir.trace import Clock, Trace
from treadle.simulator.grouping import WORK, tally, work_of

if TYPE_CHECKING:
    from treadle.simulator.printed_step import PathJson


@dataclass(frozen=True)
class PathSummary:
    """The time of a path by kind of work, by lane and by rank; each of them and the gaps add up to `length`.

    An op counts from when the one before it on the path ended: before that, a receive that was recorded early only
    waited. `gaps` is time in which nothing on the path ran, which a prediction does not have: launches, the host, other
    work. `num_hops` is how often the path goes on to another rank; `by_rank` is in the order of the first visits.
    """

    num_ops: int
    length: int
    clock: Clock
    by_kind: dict[str, int]
    by_lane: dict[str, int]
    by_rank: dict[int, int]
    num_hops: int
    gaps: int
    num_gaps: int

    def as_dict(self) -> PathJson:
        """Return a dict for JSON; times are in the clock's unit."""
        show = self.clock.show
        return {
            "unit": self.clock.unit,
            "num_ops": self.num_ops,
            "length": show(self.length),
            "by_kind": {kind: show(ticks) for kind, ticks in self.by_kind.items()},
            "by_lane": {lane: show(ticks) for lane, ticks in self.by_lane.items()},
            "by_rank": {str(rank): show(ticks) for rank, ticks in self.by_rank.items()},
            "num_hops": self.num_hops,
            "gaps": show(self.gaps),
            "num_gaps": self.num_gaps,
        }


def critical_path(trace: Trace) -> list[int]:
    """Return the indices of the ops that make the step as long as it is, each the cause of the next one's start.

    What can cause an op to start is the op before it on its lane, what it waits for, and the same of the ops it goes
    together with. The one that ended last did; in a prediction its end is the start, in a measurement there may be a
    gap. Of ops that go together only the one through which the path came is on it.

    Args:
        trace: predicted or measured.

    Returns:
        Indices of ops, from the first to start to the last to end; `trace.program.op(index)` is the op.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(treadle.generate("1f1b", pp=2, microbatches=1), unit), unit)
        >>> [str(trace.program.op(op)) for op in critical_path(trace)][::3]
        ['F0.0', 'B0.0']

    """
    return path_to(trace, int(np.argmax(trace.end))) if trace.program.num_ops else []


def path_to(trace: Trace, last: int) -> list[int]:
    """Return the ops that made op `last` end when it did, in the order of time, as `critical_path` does."""
    program = trace.program
    columns = (program.lane_ptr, program.lane_group, *program.groups, program.dep_ptr, program.dep, program.joined)
    path = _walk_back(*columns, trace.start, trace.end, last)
    return [int(op) for op in path[::-1]]


class Visits(NamedTuple):
    """The ops along a path, as columns; `work` is a number of `treadle.simulator.grouping.WORK`."""

    start: Longs
    end: Longs
    work: Bytes
    lane_kind: Bytes
    rank: Ints

    @classmethod
    def of(cls, trace: Trace, path: Sequence[int]) -> Visits:
        """Take a path's ops from a trace."""
        program, ops = trace.program, np.array(path, np.int64)
        lane = np.searchsorted(program.lane_ptr, ops, side="right") - 1
        lane_kind, rank = program.lane_kind[lane], program.lane_rank[lane]
        return cls(trace.start[ops], trace.end[ops], work_of(program)[ops], lane_kind, rank)


def summarize_path(trace: Trace, path: Sequence[int]) -> PathSummary:
    """The time on a path by kind of work, lane and rank."""
    origin = int(trace.start.min()) if len(trace.start) else 0
    return summarize_visits(Visits.of(trace, path), trace.clock, origin)


def summarize_visits(visits: Visits, clock: Clock, origin: int = 0) -> PathSummary:
    """The time on a path by kind of work, lane and rank; the step begins at `origin`."""
    if not len(visits.start):
        return PathSummary(0, 0, clock, {}, {}, {}, 0, 0, 0)
    before = np.r_[origin, np.maximum.accumulate(visits.end)[:-1]]
    spent = np.maximum(0, visits.end - np.maximum(visits.start, before))
    gap = np.maximum(0, visits.start - before)
    by_rank = _totals(visits.rank, spent)
    return PathSummary(
        num_ops=len(visits.start),
        length=int(visits.end[-1]) - origin,
        clock=clock,
        by_kind={WORK[k]: ticks for k, ticks in _totals(visits.work, spent).items()},
        by_lane={LaneKind(k).name.lower(): ticks for k, ticks in _totals(visits.lane_kind, spent).items()},
        by_rank={rank: by_rank[rank] for rank in dict.fromkeys(visits.rank.tolist())},
        num_hops=int(np.count_nonzero(np.diff(visits.rank))),
        gaps=int(gap.sum()),
        num_gaps=int(np.count_nonzero(gap)),
    )


def _totals(code: Ints | Bytes, ticks: Longs) -> dict[int, int]:
    """The ticks of each code that occurs."""
    found = tally(code.astype(np.int32), int(code.max()) + 1, ticks)
    return {int(c): int(found.total[c]) for c in np.flatnonzero(found.num)}


@kernel
def _walk_back(
    lane_ptr: Longs,
    lane_group: Ints,
    group_ptr: Longs,
    group_lane: Ints,
    dep_ptr: Longs,
    dep: Ints,
    joined: Bools,
    start: Longs,
    end: Longs,
    last: int,
) -> Longs:
    """Follow each op to its cause. Own lane and own needs come first, so that a tie stays on the rank."""
    path = np.empty(len(start), np.int64)
    count, op = 0, last
    while op >= 0 and count < len(path):
        path[count] = op
        count += 1
        lane = np.searchsorted(lane_ptr, op, side="right") - 1
        place, group = op - lane_ptr[lane], lane_group[lane]
        num = 1 if group < 0 else 1 + group_ptr[group + 1] - group_ptr[group]
        began = start[op]
        for m in range(1, num):
            began = max(began, start[lane_ptr[group_lane[group_ptr[group] + m - 1]] + place])
        cause, ended = -1, np.int64(0)
        for m in range(num):
            member = lane if m == 0 else group_lane[group_ptr[group] + m - 1]
            first = lane_ptr[member] + place
            after = first + 1
            while joined[first]:
                first -= 1
            while after < lane_ptr[member + 1] and joined[after]:
                after += 1
            if first > lane_ptr[member] and (cause < 0 or min(end[first - 1], began) > ended):
                cause, ended = first - 1, min(end[first - 1], began)
            for k in range(dep_ptr[first], dep_ptr[after]):
                wanted = dep[k]
                if wanted >= 0 and (cause < 0 or min(end[wanted], began) > ended):
                    cause, ended = wanted, min(end[wanted], began)
        op = cause
    return path[:count].copy()
