"""torch's own runtime on what Treadle exports for it: the same losses and gradients as `treadle.Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support.oracle import chunks_of, grads_of, make_batch, make_mesh, make_stages, mean_loss, worst
from tests.support.ranks import check, run_ranks
from treadle.schedules import SCHEDULES, Size

pytestmark = pytest.mark.slow

MOST_DIFFERENCE = 1e-10

Grads = dict[str, Tensor | None]
Ran = tuple[list[float], Grads, list[float], Grads]


def exported(pp: int) -> list[treadle.Schedule]:
    """All schedules that torch's CSV can carry, in small sizes."""
    found = []
    for family in SCHEDULES.values():
        for vpp in family.vpps or (2, 3):
            size = family.nearest(Size(pp, vpp, 2 * pp))
            assert size is not None
            schedule = family.generate(size)
            if schedule.placement.num_pipes == 1:
                found.append(schedule)
    return found


def own_stages(schedule: treadle.Schedule, rank: int, stages: Sequence[nn.Module]) -> dict[int, nn.Module]:
    return {number: stages[number] for number in schedule.placement.stages[rank]}


def by_torch(rank: int, schedule: treadle.Schedule, path: Path) -> tuple[list[float], Grads]:
    """A step by torch's runtime; the losses where the last stage is."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    num_stages, num_mb = schedule.placement.num_stages, schedule.num_microbatches
    own = own_stages(schedule, rank, make_stages(num_stages))
    parts: list[Any] = [
        PipelineStage(module, number, num_stages, torch.get_default_device()) for number, module in own.items()
    ]
    runtime: Any = _PipelineScheduleRuntime(parts, num_mb, loss_fn=mean_loss)  # type: ignore[no-untyped-call]
    runtime._load_csv(str(path))
    inputs, targets = make_batch(num_mb)
    losses: list[Tensor] = []
    args = (inputs,) if 0 in own else ()
    more = {"target": targets, "losses": losses} if num_stages - 1 in own else {}
    runtime.step(*args, **more)
    return [float(loss.detach()) for loss in losses], grads_of(own)


def by_treadle(rank: int, schedule: treadle.Schedule) -> tuple[list[float], Grads]:
    stages = make_stages(schedule.placement.num_stages)
    mesh = make_mesh(schedule.pp)
    pipe = treadle.Pipeline(chunks_of(schedule, rank, stages), schedule, mesh=mesh, loss_fn=mean_loss)
    pipe.step(*make_batch(schedule.num_microbatches))
    assert pipe.report is not None
    losses = pipe.report.losses.tolist()
    pipe.close()
    return losses, grads_of(own_stages(schedule, rank, stages))


def run_both(rank: int, pp: int, directory: Path) -> list[Ran]:
    return [
        (*by_torch(rank, schedule, directory / f"{place}.csv"), *by_treadle(rank, schedule))
        for place, schedule in enumerate(exported(pp))
    ]


@pytest.mark.parametrize("pp", [2, 4])
def test_torchs_runtime_makes_the_same_of_an_exported_schedule(pp: int, tmp_path: Path) -> None:
    schedules = exported(pp)
    assert {schedule.name for schedule in schedules} == set(SCHEDULES) - {"dualpipe"}
    for place, schedule in enumerate(schedules):
        (tmp_path / f"{place}.csv").write_text(treadle.dumps(schedule, "torch-csv"))
    ranks = check(run_ranks(pp, run_both, pp, tmp_path))
    for place, schedule in enumerate(schedules):
        where = f"{schedule.name} vpp={schedule.vpp}"
        last = schedule.placement.holder(schedule.placement.num_stages - 1)[0]
        for rank, results in enumerate(ranks):
            torch_losses, torch_grads, losses, grads = results[place]
            assert set(grads) == set(torch_grads), where
            assert all(grad is not None for grad in grads.values()), where
            difference, name = worst(grads, torch_grads)
            assert difference <= MOST_DIFFERENCE, f"{where} rank {rank}: {name} differs by {difference}"
            if rank == last:
                assert losses == pytest.approx(torch_losses, rel=MOST_DIFFERENCE), where


def test_dualpipe_has_no_such_form() -> None:
    schedule = treadle.generate("dualpipe", pp=4, microbatches=8)
    with pytest.raises(ValueError, match="torch's CSV cannot carry dualpipe"):
        treadle.dumps(schedule, "torch-csv")
