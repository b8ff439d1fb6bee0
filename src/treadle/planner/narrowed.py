"""Candidates narrowed to those that may be advised, the most promising first; most are never estimated.

Jobs of a family have the same sizes, and differ in what they recompute: of these the first that fits, as each further
set of modules takes longer. Families come in the order of a bound that needs no layout, their jobs in that of
`least_ticks`, and what takes too much longer than the fastest is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from itertools import chain, count
from operator import attrgetter

from treadle.estimate import Job
from treadle.estimate.job_memory import least_state_bytes
from treadle.planner.job_estimate import JobEstimate, estimate_candidate, least_of_sizes
from treadle.planner.run_errors import run_errors
from treadle.planner.simulated_step import NEAR
from treadle.planner.space import Candidate

WORTH = 1.1
"""Jobs that take longer than so many times the fastest are neither advised nor on the front."""

MANY = 2_000
"""Searches of more candidates are narrowed; of fewer all are estimated, and the front has jobs of any step time."""
ROOMY = 0.7
"""Families whose parameters, gradients and optimizer take less than this share of memory come first: most fit."""

_sizes = attrgetter(*(each.name for each in fields(Job) if each.name not in ("model", "cluster", "recompute")))
"""Everything about a job of one model on one cluster but what it recomputes."""

Progress = Callable[[int, int], None]
"""Called with how many candidates are done, and of how many."""
Family = tuple[Candidate, ...]
"""Jobs of the same sizes, in the order of what they recompute."""


@dataclass
class Narrowed:
    """What is left of candidates: estimates that fit, those that do not, and how many were passed over by a bound."""

    fitting: list[JobEstimate] = field(default_factory=list)
    too_large: list[JobEstimate] = field(default_factory=list)
    num_done: int = 0
    worth: float = WORTH
    fastest: int | None = None

    def passes(self, bound: int) -> bool:
        """True if a job that takes at least so many ticks may still matter."""
        return self.fastest is None or bound <= self.worth * self.fastest


class SearchWatch:
    """Reports on a search: how far it is, and each job that is faster than all before it."""

    def __init__(
        self,
        count: int = 0,
        progress: Progress | None = None,
        on_better: Callable[[JobEstimate], None] | None = None,
    ) -> None:
        self._count, self._progress, self._on_better = count, progress, on_better
        self._fastest: JobEstimate | None = None

    def see(self, timed: JobEstimate, done: int) -> None:
        """Take a job that was simulated and fits, after so many candidates."""
        if self._progress is not None:
            self._progress(done // 2, self._count)
        if self._on_better is None or (self._fastest is not None and timed.step_s >= self._fastest.step_s):
            return
        self._fastest = timed
        self._on_better(timed)


def estimates_of(
    points: list[Candidate], memory_limit: int, watch: SearchWatch, *, narrowed: bool
) -> list[JobEstimate]:
    """Return estimates of all candidates, or if `narrowed` of those that matter; if none fits, of all that may."""
    if narrowed:
        worth = max(WORTH, NEAR * (1 + run_errors(points[0].job).pair))
        found = narrow(points, memory_limit, worth=worth, on_timed=watch.see)
        if found.fitting:
            return [*found.fitting, *found.too_large]
    states = [least_state_bytes(point.job) for point in points]
    limit = max(memory_limit, min(states)) if narrowed else max(states)
    return [estimate_candidate(point) for point, size in zip(points, states, strict=True) if size <= limit]


def narrow(
    points: Iterable[Candidate],
    memory_limit: int,
    *,
    worth: float = WORTH,
    on_timed: Callable[[JobEstimate, int], None],
) -> Narrowed:
    """Estimate and simulate candidates in the order of their bounds, until none is left that may matter.

    Args:
        points: from `treadle.planner.space.candidates`.
        memory_limit: bytes that a rank may hold.
        worth: the longest step that may matter, as a multiple of the fastest.
        on_timed: called with each job that was simulated and fits, and how many candidates are done.

    """
    found, order = Narrowed(worth=worth), count()
    waiting: list[tuple[bool, int, int, Family | JobEstimate]] = []
    for family in families(points):
        states = least_state_bytes(family[0].job)
        if states > memory_limit:
            found.num_done += len(family)
        else:
            tight = states > ROOMY * memory_limit
            heappush(waiting, (tight, least_of_sizes(family[0].job), next(order), family))
    while waiting:
        _, bound, _, item = heappop(waiting)
        if isinstance(item, JobEstimate):
            if not found.passes(bound):
                continue
            timed = item.simulated()
            assert timed.ticks is not None
            found.fitting.append(item if item.job.offload else timed)
            if timed.memory_bytes <= memory_limit:
                found.fastest = min(timed.ticks, found.fastest or timed.ticks)
                on_timed(timed, found.num_done)
            continue
        found.num_done += len(item)
        if not found.passes(bound):
            continue
        for each in _resolved(item, memory_limit):
            if each.memory_bytes <= memory_limit:
                heappush(waiting, (False, each.least, next(order), each))
            else:
                found.too_large.append(each)
    return found


def families(points: Iterable[Candidate]) -> list[Family]:
    """Return candidates by their sizes: all knobs but what is recomputed."""
    found: dict[object, list[Candidate]] = {}
    for point in points:
        found.setdefault((_sizes(point.job), point.balanced), []).append(point)
    return [tuple(family) for family in found.values()]


def _resolved(family: Family, memory_limit: int) -> Iterable[JobEstimate]:
    """Yield the first of a family that fits, or its two last: they save least. Yield all where they offload.

    With offload, peak memory is known only after simulation.
    """
    if family[0].job.offload:
        yield from map(estimate_candidate, family)
        return
    last = [estimate_candidate(point) for point in family[-2:]]
    if all(each.memory_bytes > memory_limit for each in last):
        yield from last
        return
    for each in chain(map(estimate_candidate, family[:-2]), last):
        if each.memory_bytes <= memory_limit:
            yield each
            return
