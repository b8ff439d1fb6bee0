"""V-Half and V-Min: the memory and the bubble of arXiv 2405.15362, at every size."""

from __future__ import annotations

import pytest

import treadle
from treadle.costs import Costs
from treadle.ir.trace import Clock
from treadle.lowering import lower
from treadle.schedules import v_half, v_min
from treadle.schedules.building_block import INTERVAL
from treadle.simulator import measure, simulate

BLOCKS = {"v-half": v_half.block, "v-min": v_min.block}
SIZES = [(pp, num_mb) for pp in range(1, 13) for num_mb in (pp, 2 * pp + 1, 4 * pp)]


def idle(name: str, pp: int, num_mb: int, times: tuple[int, int, int] = (1, 1, 1)) -> int:
    """Return what the step takes longer than the work of a rank, if F, I and W of a chunk take `times`."""
    costs = Costs("", Clock("tick", 1), cells=dict(zip(("f", "i", "w"), times, strict=True)))
    schedule = treadle.generate(name, pp=pp, microbatches=num_mb)
    makespan = measure(simulate(lower(schedule, costs), costs)).makespan
    return makespan - 2 * num_mb * sum(times)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_rank_has_two_passes_in_a_tick(name: str) -> None:
    """Blocks are repeated every six ticks, and each rank has F and I of two chunks, and room for two W."""
    for pp in range(1, 65):
        starts = BLOCKS[name](pp).starts(pp)
        assert len(starts) == 4 * pp
        for rank in range(pp):
            places = (rank, 2 * pp - 1 - rank, 2 * pp + rank, 4 * pp - 1 - rank)
            assert len({starts[place] % INTERVAL for place in places}) == 4


def peak(name: str, pp: int, num_mb: int) -> int:
    return max(treadle.verify(treadle.generate(name, pp=pp, microbatches=num_mb)).peak_activations)


@pytest.mark.slow
def test_peaks_are_the_published_ones() -> None:
    """In micro-batches: (P+2)//2 and (P+4)//3, two chunks each; 1F1B holds P."""
    for pp, num_mb in SIZES:
        assert peak("v-half", pp, num_mb) == 2 * ((pp + 2) // 2), (pp, num_mb)
        assert peak("v-min", pp, num_mb) == 2 * ((pp + 4) // 3), (pp, num_mb)


@pytest.mark.slow
def test_bubbles_are_at_most_the_published_ones() -> None:
    """1F1B waits 6(P-1) passes of a chunk; published are about half of that and two thirds, and so it is for any M."""
    for pp, num_mb in SIZES:
        if pp == 1:
            assert idle("v-half", pp, num_mb) == idle("v-min", pp, num_mb) == 0
            continue
        odd = pp % 2 == 1 or pp == 2
        assert idle("v-half", pp, num_mb) == (3 * pp - 4 if odd else 3 * pp - 5) < 3 * (pp - 1)
        assert idle("v-min", pp, num_mb) == 4 * pp - 5 < 4 * (pp - 1)


@pytest.mark.slow
def test_v_half_bears_unequal_times_and_v_min_does_not() -> None:
    """V-Half's bubble does not grow with M where 2I <= 2F + W and 2F <= 2I + W, as published."""
    for times in ((10, 12, 8), (8, 12, 10), (12, 10, 4), (10, 10, 20), (10, 10, 5)):
        for pp in (4, 7):
            assert idle("v-half", pp, 16, times) == idle("v-half", pp, 48, times) < (pp - 1) * 2 * sum(times)
    for times in ((10, 14, 6), (14, 10, 6)):
        assert idle("v-half", 4, 16, times) < idle("v-half", 4, 48, times)
    assert idle("v-min", 4, 16, (10, 12, 8)) < idle("v-min", 4, 48, (10, 12, 8))
