"""One schedule on real processes against the whole model in one: `pytest --schedule NAME` runs its case."""

from __future__ import annotations

import pytest

from tests.runtime.test_pipeline import cases, check_against_whole, run_twice
from tests.support.ranks import check, run_ranks
from treadle.schedules import SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_the_gradients_of_a_single_process(name: str) -> None:
    for pp, dp in ((2, 1), (4, 1), (2, 2)):
        listed = [case for case in cases(pp) if case.name == name]
        ranks = check(run_ranks(pp * dp, run_twice, pp, dp, listed))
        for place, case in enumerate(listed):
            check_against_whole(case, pp, dp, [results[place] for results in ranks])
