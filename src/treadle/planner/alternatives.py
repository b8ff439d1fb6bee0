"""The chosen job beside those that differ from it in one knob: what another value would cost, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from treadle.estimate import Job
from treadle.estimate.cluster import GIB
from treadle.estimate.host_copies import host_shortage
from treadle.planner.advised_job import Advisor, rank_of, within_error_s
from treadle.planner.job_estimate import Alternative, JobEstimate, estimate_candidate, estimate_job
from treadle.planner.ranked_search import SearchResult, with_job
from treadle.planner.space import Candidate
from treadle.schedules import family
from treadle.trainers.megatron import refusal

KNOBS = (
    "schedule",
    "tp",
    "cp",
    "pp",
    "vpp",
    "ep",
    "micro_batch_size",
    "recompute",
    "offload",
    "sharding",
    "gradient_bytes",
    "moment_bytes",
    "saved",
    "dispatch",
    "cuda_graph",
    "precision",
)
_WITH = {"schedule": ("vpp",)}
"""Knobs that may follow another: a schedule brings its own number of chunks."""


def with_alternatives(found: SearchResult, points: Iterable[Candidate] = ()) -> SearchResult:
    """Return the search's result with the alternatives of the best job, none of which would be advised instead.

    A search ranks jobs by choices that near ones share; alternatives are simulated whole, each with its own choices. So
    one of them may turn out to be the fastest, or as simple as the best and faster: then it is that, until none is.
    `points` are all candidates; those that differ from the best in one knob are estimated, unless they are known.
    """
    whole: dict[Job, JobEstimate] = {}
    while True:
        found = _with_neighbours(found, points)
        others = alternatives(found, whole)
        fitting = [other.estimate for other in others if other.fits]
        fastest = min((found.fastest, *fitting), key=lambda each: each.step_s)
        if fastest is not found.fastest:
            best = Advisor(found.fitting, found.memory_limit).advise(fastest)
        else:
            rivals = (found.best, *(each for each in fitting if each.step_s <= within_error_s(fastest)))
            best = min(rivals, key=lambda each: rank_of(each, found.memory_limit))
        if best is found.best:
            return replace(found, fastest=fastest, front=with_job(found.front, fastest), alternatives=others)
        found = replace(found, best=best, fastest=fastest, front=with_job(with_job(found.front, fastest), best))


def with_graphs(found: SearchResult) -> SearchResult:
    """Return the result with partial CUDA graphs among the alternatives: a search does not turn them on by itself."""
    job = replace(found.best.job, cuda_graph="partial")
    if refusal(job, named=True) is not None:
        return found
    graphed = estimate_job(job).simulated_whole()
    fits = _Fits({id(graphed)}, found.memory_limit, {job: graphed})
    other = _alternative(found.best, "cuda_graph", "partial", [graphed], fits)
    return replace(found, alternatives=(*found.alternatives, other))


def _with_neighbours(found: SearchResult, points: Iterable[Candidate]) -> SearchResult:
    """Return the result with all candidates that differ from the best in one knob."""
    known = {each.job for each in (*found.fitting, *found.too_large)}
    near = [point for point in points if _only_difference(found.best.job, point.job) is not None]
    more = [each for each in map(estimate_candidate, near) if each.job not in known]
    fits = [each for each in more if each.memory_bytes <= found.memory_limit]
    larger = [each for each in more if each.memory_bytes > found.memory_limit]
    return replace(found, fitting=(*found.fitting, *fits), too_large=(*found.too_large, *larger))


def alternatives(found: SearchResult, whole: dict[Job, JobEstimate] | None = None) -> tuple[Alternative, ...]:
    """Return for each knob and each other value that was considered the best such job, simulated whole where it fits.

    `whole` keeps what was simulated, for a next call.
    """
    known = whole if whole is not None else {}
    nearest: dict[tuple[str, str], list[JobEstimate]] = {}
    fitting = set(map(id, found.fitting))
    for each in (*found.fitting, *found.too_large):
        knob = _only_difference(found.best.job, each.job)
        if knob is not None:
            nearest.setdefault((knob, shown(each.job, knob)), []).append(each)
    made = [
        _alternative(found.best, knob, value, group, _Fits(fitting, found.memory_limit, known))
        for (knob, value), group in nearest.items()
    ]
    return tuple(sorted(made, key=lambda other: (KNOBS.index(other.knob), not other.fits, other.slower or 0.0)))


def shown(job: Job, knob: str) -> str:
    """Return the value of a knob as people write it."""
    value = getattr(job, knob)
    if knob in ("recompute", "offload"):
        return "+".join(value) or "none"
    if knob == "schedule" and not family(job.schedule).vpps:
        return f"{value}:vpp={job.vpp}"
    return str(value)


def _only_difference(best: Job, job: Job) -> str | None:
    """Return the one knob in which two jobs differ, or None."""
    differing = [knob for knob in KNOBS if getattr(job, knob) != getattr(best, knob)]
    if len(differing) > 1 and differing[0] in _WITH and set(differing[1:]) <= set(_WITH[differing[0]]):
        return differing[0]
    return differing[0] if len(differing) == 1 else None


class _Fits(NamedTuple):
    """What fits as far as is known, the limit that decides, and jobs that were simulated whole."""

    fitting: set[int]
    limit: int
    whole: dict[Job, JobEstimate]

    def fastest(self, group: Iterable[JobEstimate]) -> JobEstimate | None:
        """Return the fastest that fits, simulated whole, or None."""
        feasible = [each.simulated() for each in group if id(each) in self.fitting]
        for near in sorted(feasible, key=lambda each: each.step_s):
            exact = self.whole[near.job] = self.whole.get(near.job) or near.simulated_whole()
            if exact.memory_bytes <= self.limit:
                return exact
        return None


def _alternative(best: JobEstimate, knob: str, value: str, group: list[JobEstimate], fits: _Fits) -> Alternative:
    fastest = fits.fastest(group)
    if fastest is None:
        known = (fits.whole.get(each.job) or each.simulated() for each in group)
        least = min(known, key=lambda each: each.memory_bytes)
        reason = host_shortage(least.job) or f"does not fit: {least.memory_bytes / GIB:.1f} GiB"
        return Alternative(knob, value, least, False, None, reason)
    slower = fastest.step_s / best.step_s - 1
    return Alternative(knob, value, fastest, True, slower, _reason(best, fastest))


def _reason(best: JobEstimate, other: JobEstimate) -> str:
    """Return where the time goes: into computing, or into stalls, the wait for messages and other stages."""
    assert best.ticks
    assert other.ticks
    scale = 1 / best.ticks
    compute = (other.least - best.least) * scale
    stalls = (other.ticks - other.least - best.ticks + best.least) * scale
    memory = (other.memory_bytes - best.memory_bytes) / GIB
    parts = [
        f"{what} {share:+.1%}" for what, share in (("compute", compute), ("stalls", stalls)) if abs(share) >= 0.0005
    ]
    if abs(memory) >= 0.05:
        parts.append(f"memory {memory:+.1f} GiB")
    return ", ".join(parts) or "the same"
