"""Steps that add up, and training over several of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from tests.support.cases import (
    MOST_DIFFERENCE,
    Grads,
    hold,
    own_grads,
    pipeline,
    refusal,
    replica_of,
    schedule_of,
    take_step,
)
from tests.support.oracle import (
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


def accumulate(rank: int, name: str, dp: int, reduces: Sequence[bool]) -> tuple[float, Grads, list[bool]]:
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    pipe = pipeline(schedule, stages, mesh)
    reduced = []
    for seed, reduce in enumerate(reduces):
        loss = take_step(pipe, *make_batch(4, replica_of(mesh), seed=seed), reduce=reduce)
        assert pipe.report is not None
        reduced.append(pipe.report.reduced)
    return float(loss), own_grads(schedule, mesh, stages), reduced


@pytest.mark.parametrize("reduces", [(True, True, True), (False, True), (False, False, True)])
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe", 2)])
def test_steps_add_up(name: str, dp: int, reduces: tuple[bool, ...]) -> None:
    stages = make_stages(schedule_of(name, 2, 4).placement.num_stages)
    for seed in range(len(reduces)):
        losses = run_whole(stages, cut([make_batch(4, replica, seed=seed) for replica in range(dp)], 4), mean_loss)
    wanted = sum(losses) / len(losses), grads_of(dict(enumerate(stages)))
    ranks = check(run_ranks(2 * dp, accumulate, name, dp, reduces))
    hold([ran[:2] for ran in ranks], wanted)
    alone = name != "dualpipe" and dp == 1  # then there is nothing to reduce
    assert all(reduced == [alone or reduce for reduce in reduces] for _, _, reduced in ranks)


def local_after_reduced(rank: int) -> tuple[str, Grads, Grads]:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2, 2)
    stages = make_stages(2)
    pipe = pipeline(schedule, stages, mesh)
    batch = make_batch(4, replica_of(mesh))
    pipe.step(*batch)
    first = own_grads(schedule, mesh, stages)
    said = refusal(lambda: take_step(pipe, *batch, reduce=False))
    time.sleep(1.0)  # a refusal that all ranks raise is no loss, however long they take to go on
    for stage in stages:
        stage.zero_grad()
    take_step(pipe, *batch, reduce=False)
    pipe.step(*batch)
    return said, first, own_grads(schedule, mesh, stages)


def test_a_local_step_after_a_reduced_one_is_refused() -> None:
    for said, once, twice in check(run_ranks(4, local_after_reduced)):
        assert "a step in no_sync() after a reduced step" in said
        assert "set the gradients to None first" in said
        assert worst(twice, {name: None if g is None else 2 * g for name, g in once.items()})[0] <= MOST_DIFFERENCE


def train(rank: int, name: str, dp: int) -> tuple[list[float], Grads]:
    """Losses of three steps with an optimizer, and the parameters after them."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    own = {number: stages[number] for number in schedule.placement.stages[mesh.get_local_rank("pp")]}
    optimizer = torch.optim.AdamW([p for stage in own.values() for p in stage.parameters()], lr=0.1)
    pipe = pipeline(schedule, stages, mesh)
    losses = []
    for seed in range(3):
        losses.append(float(pipe.step(*make_batch(4, replica_of(mesh), seed=seed))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed > 0)
    return losses, values_of(own)


def values_of(stages: Mapping[int, nn.Module]) -> Grads:
    return {f"{s}.{name}": p.detach().clone() for s, stage in stages.items() for name, p in stage.named_parameters()}


@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 2)])
def test_training_goes_the_same_way(name: str, dp: int) -> None:
    stages = make_stages(schedule_of(name, 2, 4).placement.num_stages)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.1)
    wanted = []
    for seed in range(3):
        losses = run_whole(stages, cut([make_batch(4, replica, seed=seed) for replica in range(dp)], 4), mean_loss)
        wanted.append(sum(losses) / len(losses))
        optimizer.step()
        optimizer.zero_grad()
    for losses, values in check(run_ranks(2 * dp, train, name, dp)):
        assert losses == pytest.approx(wanted, rel=1e-8)
        assert worst(values, values_of(dict(enumerate(stages))))[0] <= 1e-6  # Adam divides by what may be small
