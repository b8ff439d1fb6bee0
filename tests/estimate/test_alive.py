"""What schedules keep alive: held to the verifier's peaks, and few micro-batches to many."""

from __future__ import annotations

import numpy as np
import pytest

import treadle
from treadle.estimate.alive import Moments, moments
from treadle.lowering import LoweringOptions
from treadle.schedules import SCHEDULES, Size

SIZES = [
    (name, pp, vpp) for name, family in SCHEDULES.items() for pp in (2, 4, 6) for vpp in (family.vpps or (2, 3))[:2]
]


def _can(name: str, pp: int, vpp: int, microbatches: int) -> int:
    """The nearest number of micro-batches that the schedule can do."""
    found = SCHEDULES[name].nearest(Size(pp, vpp, microbatches))
    assert found is not None
    assert (found.pp, found.vpp) == (pp, vpp)
    return found.microbatches


def _most(found: Moments, pp: int) -> list[int]:
    alive = (found.full + found.split).sum(1)
    return [int(alive[found.rank == rank].max()) for rank in range(pp)]


@pytest.mark.parametrize(("name", "pp", "vpp"), SIZES)
def test_most_alive_is_what_the_verifier_finds(name: str, pp: int, vpp: int) -> None:
    microbatches = _can(name, pp, vpp, 3 * pp)
    schedule = treadle.generate(name, pp=pp, vpp=vpp, microbatches=microbatches)
    one_layer_a_stage = LoweringOptions(model_layers=schedule.placement.num_stages)
    report = treadle.verify(treadle.lower(schedule, options=one_layer_a_stage))
    assert report.peak_unit == "layers"
    assert _most(moments(name, pp=pp, vpp=vpp, microbatches=microbatches), pp) == list(report.peaks)


@pytest.mark.parametrize(("name", "pp", "vpp"), SIZES)
def test_few_micro_batches_stand_for_many(name: str, pp: int, vpp: int) -> None:
    many = _can(name, pp, vpp, 24 * pp + 2)
    found = moments(name, pp=pp, vpp=vpp, microbatches=many)
    family = SCHEDULES[name]
    rows = family.generate(family.size(pp, vpp, many)).rows
    for rank, row in enumerate(rows):
        alive, most = np.zeros(vpp), 0.0
        weights = np.arange(1, vpp + 1) ** 2  # chunks of unequal size: which of them are alive counts as well
        for cell in row:
            for action in cell.actions:
                if action.kind.name == "F":
                    alive[action.chunk] += 1
            most = max(most, float(alive @ weights))
            for action in cell.actions:
                if action.kind.name in "BW":
                    alive[action.chunk] -= 1
        here = found.rank == rank
        assert ((found.full + found.split)[here] @ weights).max() == most


def test_every_moment_says_what_is_computed() -> None:
    found = moments("dualpipev", pp=4, vpp=2, microbatches=16)
    assert ((found.forward >= 0) | (found.backward >= 0) | found.split.any(1)).all(), "a weight half, if nothing else"
    assert ((found.forward >= 0) & (found.backward >= 0)).any(), "overlapped cells compute both"
    assert found.starts[-1] == len(found.rank)


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="nearest size"):
        moments("dualpipe", pp=4, vpp=2, microbatches=7)
