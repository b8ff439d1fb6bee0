"""An order that a solver found, from its file, on real processes: the gradients are those of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import treadle
from tests.support.oracle import (
    chunks_of,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
    worst,
)
from tests.support.ranks import check, run_ranks
from treadle.schedules import SCHEDULES
from treadle.synthesize import MemoryLimits, SolverOptions, synthesize_schedule

MOST_DIFFERENCE = 1e-10


def run_file(rank: int, path: str) -> tuple[float, dict[str, Tensor | None]]:
    """A step of the schedule in a file."""
    schedule = treadle.loads(Path(path).read_text())
    stages = make_stages(schedule.placement.num_stages)
    pipe = treadle.Pipeline(
        chunks_of(schedule, rank, stages), schedule, mesh=make_mesh(schedule.pp, 1), loss_fn=mean_loss
    )
    loss = pipe.step(*make_batch(schedule.num_microbatches, 0))
    grads = grads_of({number: stages[number] for number in schedule.placement.stages[rank]})
    pipe.close()
    return float(loss), grads


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "pp", "room"), [("loop", 4, 3), ("v", 2, 3)])
def test_gradients_are_those_of_a_single_process(placement: str, pp: int, room: int, tmp_path: Path) -> None:
    found = synthesize_schedule(
        pp=pp,
        microbatches=8,
        placement=placement,
        limits=MemoryLimits(max_activations=room),
        solver=SolverOptions(30),
    )
    assert found.source not in SCHEDULES, "an order that no generator makes"
    path = tmp_path / "found.txt"
    path.write_text(treadle.dumps(found.schedule))
    stages = make_stages(found.schedule.placement.num_stages)
    losses = run_whole(stages, cut([make_batch(8, 0)], 8), mean_loss)
    expected = grads_of(dict(enumerate(stages)))
    seen: set[str] = set()
    for loss, grads in check(run_ranks(pp, run_file, str(path))):
        assert loss == pytest.approx(sum(losses) / len(losses), rel=MOST_DIFFERENCE)
        difference, where = worst(grads, expected)
        assert difference <= MOST_DIFFERENCE, where
        seen |= set(grads)
    assert seen == set(expected)
