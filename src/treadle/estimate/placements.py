"""Which rank of a job's pipeline holds which stage."""

from __future__ import annotations

from functools import lru_cache

from treadle.ir import Placement
from treadle.schedules import family


@lru_cache(maxsize=1024)
def placement_of(schedule: str, pp: int, vpp: int) -> Placement:
    """Return which rank holds which stage.

    Raises:
        ValueError: there is no such schedule.

    """
    return family(schedule).placement(pp, vpp)
