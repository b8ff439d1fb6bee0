"""A resumed pipeline has the randomness of the step that it goes on with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.ranks import check, run_ranks


def _losses(rank: int) -> tuple[list[float], float, str]:
    mesh = init_device_mesh(DEVICE_TYPE, (1,), mesh_dim_names=("pp",))
    schedule = treadle.generate("1f1b", pp=1, microbatches=2)
    x = torch.ones(4, 64)

    def pipeline() -> treadle.Pipeline:
        return treadle.Pipeline({0: nn.Dropout(0.5)}, schedule, mesh=mesh, loss_fn=lambda y, _: (y * ramp).sum())

    ramp = torch.arange(64.0)
    first = pipeline()
    losses = [float(first.step(x)) for _ in range(3)]
    first.close()
    resumed = pipeline()
    resumed.resume_at(2)
    told = ""
    try:
        resumed.resume_at(-1)
    except ValueError as error:
        told = str(error)
    loss = float(resumed.step(x))
    resumed.close()
    return losses, loss, told


def test_a_resumed_step_draws_the_numbers_of_its_own_step() -> None:
    [(losses, resumed, told)] = check(run_ranks(1, _losses))
    assert len(set(losses)) == 3
    assert resumed == pytest.approx(losses[2], abs=0)
    assert told == "steps are counted from 0, got -1"
