"""Offload as little as makes a job fit: the modules with the fewest bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, combinations

from treadle.estimate import Job
from treadle.estimate.host_copies import module_bytes
from treadle.estimate.job_memory import estimate_memory
from treadle.planner.job_estimate import JobEstimate, estimate_job

_LIMITS = (1.0, 0.93)
"""Shares of the memory limit that a job is made to fit into: copies may lag, which only its simulation shows."""


def offloaded_to_fit(too_large: Iterable[JobEstimate], memory_limit: int) -> Iterator[JobEstimate]:
    """Yield jobs that do not fit with as little offload as may make them fit, with a little more, and with all."""
    for each in too_large:
        sets = _sets(each.job)
        places = [_first_that_fits(each.job, sets, round(share * memory_limit)) for share in _LIMITS]
        if places[0] < len(sets):
            for place in dict.fromkeys((*places, len(sets) - 1)):
                yield estimate_job(replace(each.job, offload=sets[min(place, len(sets) - 1)]))


def _first_that_fits(job: Job, sets: list[tuple[str, ...]], memory_limit: int) -> int:
    return bisect_left(sets, True, key=lambda modules: _fits(job, modules, memory_limit))


def with_least_offload(found: JobEstimate, memory_limit: int) -> JobEstimate:
    """Return a job that offloads and fits with the fewest bytes offloaded that still fit, simulated whole."""
    sets = _sets(found.job)
    fewer = sets[: next(place for place, modules in enumerate(sets) if set(modules) == set(found.job.offload))]
    fewer = fewer[_first_that_fits(found.job, fewer, memory_limit) :]

    @cache
    def simulated(modules: tuple[str, ...]) -> JobEstimate:
        return estimate_job(replace(found.job, offload=modules)).simulated_whole()

    place = bisect_left(fewer, True, key=lambda modules: simulated(modules).memory_bytes <= memory_limit)
    return simulated(fewer[place]) if place < len(fewer) else found


def _fits(job: Job, modules: tuple[str, ...], memory_limit: int) -> bool:
    return max(rank.total for rank in estimate_memory(replace(job, offload=modules))) <= memory_limit


def _sets(job: Job) -> list[tuple[str, ...]]:
    """Return all sets of a job's modules, the fewest bytes first."""
    sizes = module_bytes(job)
    sets = chain.from_iterable(combinations(sizes, count) for count in range(1, len(sizes) + 1))
    return sorted(sets, key=lambda modules: (sum(sizes[name] for name in modules), len(modules)))
