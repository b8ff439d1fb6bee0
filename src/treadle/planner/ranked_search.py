"""The search: jobs that fit are bounded, simulated and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from treadle.estimate.cluster import GIB
from treadle.estimate.host_copies import host_shortage
from treadle.estimate.job_memory import estimate_memory
from treadle.planner.advised_job import Advisor, reason_text, within_error_s
from treadle.planner.front import Front
from treadle.planner.job_estimate import Alternative, JobEstimate, describe, with_light_stages
from treadle.planner.narrowed import MANY, Progress, SearchWatch, estimates_of
from treadle.planner.offload_choice import offloaded_to_fit, with_least_offload
from treadle.planner.simulated_step import NEAR
from treadle.planner.space import Candidate

OnBetter = Callable[["SearchResult"], None]
"""Called with what is best so far."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `front` is in order of time, simulated whole; `fitting` are all that fit, those first."""

    best: JobEstimate
    """The advised job: within the error of the fastest, the one with the fewest moving parts."""

    fastest: JobEstimate
    """The fastest that was considered and fits."""

    front: tuple[JobEstimate, ...]
    fitting: tuple[JobEstimate, ...]
    too_large: tuple[JobEstimate, ...]
    memory_limit: int
    num_candidates: int = 0
    """All that the space has: those that fit, those that do not, and those that a bound passed over."""

    unable: tuple[tuple[str, str], ...] = ()
    """Schedules that can do no job of the space, each with the reason."""

    alternatives: tuple[Alternative, ...] = ()
    """The best jobs that differ from the best one in one knob (`treadle.planner.alternatives.with_alternatives`)."""

    without_offload: JobEstimate | None = None
    """Where the best job or the fastest offloads: the job that would be advised without, or None if none fits."""

    @property
    def reason(self) -> str:
        """Why the best job is not the fastest; "" if it is."""
        return reason_text(self.best, self.fastest)

    @property
    def num_simulated(self) -> int:
        """How many of those that fit were simulated."""
        return sum(each.ticks is not None for each in self.fitting)


def search(
    candidates: Iterable[Candidate],
    memory_limit: int,
    *,
    offload: bool = False,
    bounded: bool = True,
    many: int = MANY,
    progress: Progress | None = None,
    on_better: OnBetter | None = None,
) -> SearchResult:
    """Find the job to advise, the fastest that fits, and the front of time and memory.

    Args:
        candidates: from `treadle.planner.space.candidates`.
        memory_limit: bytes that a rank may hold.
        offload: where none of them fits, offload as little as makes one fit.
        bounded: pass over jobs that cannot be best or on the front. The result is the same, later.
        many: with more candidates, those whose bound is far above the fastest step are not even estimated, and the
            front has only jobs near it.
        progress: called with the candidates done, and all of them.
        on_better: with `many` candidates called with each job that is faster than all before it.

    Raises:
        ValueError: nothing fits, or the host cannot take what is offloaded; the message names what comes nearest.

    """
    points = list(candidates)
    if not points:
        raise ValueError("there is no candidate to search among; widen the space")

    def better(job: JobEstimate) -> None:
        assert on_better is not None
        on_better(SearchResult(job, job, (job,), (job,), (), memory_limit, num_candidates=len(points)))

    narrowed = bounded and len(points) > many
    watch = SearchWatch(len(points), progress, better if on_better is not None else None)
    estimates = {each.job: each for each in estimates_of(points, memory_limit, watch, narrowed=narrowed)}
    pool = _Pool(list(estimates.values()), memory_limit, bounded=bounded)
    found = _rank(pool, progress)
    if found is None and all(point.balanced and point.job.layout is None for point in points):
        pool = _Pool([*map(with_light_stages, pool.too_large)], memory_limit, bounded=bounded)
        found = _rank(pool)
    if found is None and offload:
        larger = pool.too_large
        pool = _Pool([*larger, *offloaded_to_fit(larger, memory_limit)], memory_limit, bounded=bounded)
        found = _rank(pool)
        if found is not None:
            least = with_least_offload(found.best, memory_limit)
            found = replace(found, best=least if least.step_s <= within_error_s(found.fastest) else found.best)
    if found is None:
        raise _nothing_fits(pool.too_large, memory_limit, len(points))
    found = replace(found, num_candidates=len(points))
    if not (found.best.job.offload or found.fastest.job.offload):
        return found
    left = [point for point in points if not point.job.offload]
    kept = estimates_of(left, memory_limit, SearchWatch(), narrowed=narrowed) if left else []
    plain = _rank(_Pool(kept, memory_limit, bounded=bounded))
    return replace(found, without_offload=plain.best if plain is not None else None)


def _rank(pool: _Pool, progress: Progress | None = None) -> SearchResult | None:
    """Return the jobs of a pool in their order, or None if none fits."""
    pool.simulate(progress)
    pool.simulate_front()
    if not pool.front:
        return None
    front, advisor = tuple(pool.front), Advisor(pool.fitting, pool.limit)
    best = advisor.advise(front[0])
    while best.step_s < front[0].step_s:  # simulated whole, a job may turn out to be the fastest
        front = with_job(front, best)
        best = advisor.advise(best)
    first = {each.job: each for each in (*front, best)}
    rest = (advisor.simulated.get(each.job, each) for each in pool.fitting if each.job not in first)
    fitting = (*first.values(), *rest)
    return SearchResult(best, front[0], front, fitting, tuple(pool.too_large), pool.limit)


def with_job(front: Iterable[JobEstimate], job: JobEstimate) -> tuple[JobEstimate, ...]:
    """Return a front with one more job, which was simulated, and without those that it beats."""
    pairs = Front()
    by_pair: dict[tuple[int, int], JobEstimate] = {}
    for each in (*front, job):
        pairs.add(*_time_and_memory(each))
        by_pair.setdefault(_time_and_memory(each), each)
    return tuple(by_pair[pair] for pair in pairs.pairs)


class _Pool:
    """Candidates on the way from bounded over simulated to simulated whole.

    What does not fit is sorted out; where activations are offloaded, that shows in the simulation only.
    """

    def __init__(self, estimates: list[JobEstimate], memory_limit: int, *, bounded: bool) -> None:
        self.limit, self.bounded, self.count = memory_limit, bounded, len(estimates)
        able = [each.memory_bytes <= memory_limit and host_shortage(each.job) is None for each in estimates]
        self.untimed = [each for each, fits in zip(estimates, able, strict=True) if fits]
        self.too_large = [each for each, fits in zip(estimates, able, strict=True) if not fits]
        self.timed: list[JobEstimate] = []
        self.whole: list[JobEstimate] = []
        self._near: list[JobEstimate] = []
        """Too large by the simulation of few micro-batches, but perhaps not by that of all."""

    @property
    def fitting(self) -> list[JobEstimate]:
        """All that fit, as far as is known."""
        return [*self.whole, *self.timed, *self.untimed]

    @property
    def front(self) -> list[JobEstimate]:
        """Those that no faster one beats in memory, in order of time."""
        found: list[JobEstimate] = []
        for each in sorted((*self.whole, *self.timed), key=_time_and_memory):
            if not found or each.memory_bytes < found[-1].memory_bytes:
                found.append(each)
            elif _time_and_memory(each) == _time_and_memory(found[-1]):
                found[-1] = min(found[-1], each, key=_name)
        return found

    def simulate(self, progress: Progress | None = None) -> bool:
        """Simulate structure after structure, the most promising first; pass over what the front beats.

        Return whether there was anything to simulate.
        """
        front = Front()
        for each in self.front:
            front.add(*_time_and_memory(each))
        groups: dict[object, list[JobEstimate]] = {}
        for each in sorted(self.untimed, key=lambda each: each.least):
            groups.setdefault(each.structure, []).append(each)
        waiting, done, total = [], 0, len(self.untimed)
        for group in groups.values():
            for each in group:
                if self.bounded and front.beats(each.least, each.memory_bytes):
                    waiting.append(each)
                elif (timed := self._add(each.simulated())) is not None:
                    front.add(*_time_and_memory(timed))
                done += 1
                if progress is not None:
                    progress(self.count // 2 + done * self.count // (2 * total), self.count)
        self.untimed = waiting
        return len(waiting) < total

    def _add(self, each: JobEstimate) -> JobEstimate | None:
        """Take a simulated job; return it if it fits."""
        if each.memory_bytes <= self.limit:
            self.timed.append(each)
            return each
        near = each.memory_bytes <= NEAR * self.limit
        (self._near if near else self.too_large).append(each)
        return None

    def simulate_front(self) -> None:
        """Simulate whole what is on the front, until all of it is: some turn out to be slower, or do not fit."""
        while True:
            front = self.front
            near = min(self._near, key=lambda each: each.step_s, default=None)
            if near is not None and (not front or near.step_s < front[0].step_s):
                todo = [near]
            else:
                todo = [each for each in front if not _among(each, self.whole)]
            if not todo and not self.simulate():
                self.too_large += self._near
                return
            for each in todo:
                self.timed = [other for other in self.timed if other is not each]
                self._near = [other for other in self._near if other is not each]
                exact = each.simulated_whole()
                (self.whole if exact.memory_bytes <= self.limit else self.too_large).append(exact)


def _among(each: JobEstimate, others: list[JobEstimate]) -> bool:
    return any(each is other for other in others)


def _nothing_fits(too_large: list[JobEstimate], memory_limit: int, count: int) -> ValueError:
    """Say what comes nearest; the memory of what is offloaded is known once it is simulated."""
    known: list[JobEstimate] = []
    for each in sorted(too_large, key=lambda each: each.memory_bytes):
        if known and min(other.memory_bytes for other in known) <= each.memory_bytes:
            break
        known.append(each.simulated() if each.job.offload else each)
    nearest = min(known, key=lambda each: each.memory_bytes)
    refused = host_shortage(nearest.job) if nearest.memory_bytes <= memory_limit else None
    if refused is not None:
        return ValueError(f"none of {count:,} candidates fits: {describe(nearest.job)}: {refused}")
    return ValueError(
        f"none of {count:,} candidates fits into {memory_limit / GIB:.1f} GiB; the least takes "
        f"{nearest.memory_bytes / GIB:.1f} GiB ({describe(nearest.job)}); take more GPUs than "
        f"{nearest.job.cluster.num_gpus:,}, or a higher limit{_with_bf16_gradients(nearest, memory_limit)}"
    )


def _with_bf16_gradients(nearest: JobEstimate, memory_limit: int) -> str:
    """Return words about the job with BF16 gradients, if it fits so."""
    halved = max(rank.total for rank in estimate_memory(replace(nearest.job, gradient_bytes=2)))
    if nearest.job.gradient_bytes == 2 or nearest.job.offload or halved > memory_limit:
        return ""
    return f"; with gradients in bf16 it takes {halved / GIB:.1f} GiB"


def _time_and_memory(each: JobEstimate) -> tuple[int, int]:
    assert each.ticks is not None
    return each.ticks, each.memory_bytes


def _name(each: JobEstimate) -> str:
    """Return what orders jobs of the same time and memory."""
    return f"{describe(each.job)} {each.job.layout}"
