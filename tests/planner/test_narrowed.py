"""A narrowed search finds what a search of all candidates finds, and reports on the way."""

from __future__ import annotations

import pytest

from random_searches import random_search
from treadle.planner import SearchResult, search
from treadle.planner.job_estimate import estimate_candidate, least_of_sizes
from treadle.planner.narrowed import families


@pytest.mark.parametrize("seed", [1, 4, 6, 8])
def test_bounds_do_not_change_the_advice(seed: int) -> None:
    points, limit = random_search(seed)
    some, every = (search(points, limit, bounded=bounded, many=0) for bounded in (True, False))
    assert some.best == every.best
    assert some.fastest == every.fastest
    assert some.num_simulated < every.num_simulated
    assert some.num_candidates == every.num_candidates == len(points)


def test_better_jobs_are_reported_while_the_search_goes_on() -> None:
    points, limit = random_search(6)
    better: list[SearchResult] = []
    found = search(points, limit, many=0, on_better=better.append)
    steps = [each.best.step_s for each in better]
    assert steps == sorted(set(steps), reverse=True)
    assert better[-1].fastest.step_s == pytest.approx(found.fastest.step_s, rel=0.05)
    assert all(each.best.memory_bytes <= limit for each in better)


@pytest.mark.parametrize("seed", [2, 6, 7])
def test_no_job_of_a_family_beats_the_bound_of_its_sizes(seed: int) -> None:
    points, _ = random_search(seed)
    for family in families(points)[::5]:
        least = least_of_sizes(family[0].job)
        assert 0 < least <= min(estimate_candidate(point).least for point in family)
        assert len({point.job.recompute for point in family}) == len(family)
