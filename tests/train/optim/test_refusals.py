"""What the optimizer refuses, on every rank, and how a rank's loss is told."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.cases import refusal, take_step
from tests.support.ranks import check, run_ranks
from tests.train.layouts import Layout, place
from treadle.models.views import NamedView
from treadle.runtime import RankLostError
from treadle.train.optim import ShardedOptimizer


def refused(rank: int) -> list[str]:
    placed = place(rank, Layout(dp=2))
    views, pipe = placed.views, placed.pipe
    norm = next(number for number, view in enumerate(views) if view.name == "model.norm.weight")
    expert = next(number for number, view in enumerate(views) if "experts.1.up_proj" in view.name)
    renamed = [replace(view, name=f"{view.name}.{rank}") if "router" in view.name else view for view in views]
    twice = [replace(view, name="model.norm.weight") if view.name == "model.norm.bias" else view for view in views]
    foreign = [*views, NamedView("model.extra", nn.Parameter(torch.zeros(2)))]
    said = [
        refusal(lambda: ShardedOptimizer(pipe, views[:norm] + views[norm + 1 :] if rank == 1 else views)),
        refusal(lambda: ShardedOptimizer(pipe, views[:expert] + views[expert + 1 :])),
        refusal(lambda: ShardedOptimizer(pipe, renamed)),
        refusal(lambda: ShardedOptimizer(pipe, foreign)),
        refusal(lambda: ShardedOptimizer(pipe, twice)),
    ]
    optimizer = ShardedOptimizer(pipe, views)
    said.append(refusal(lambda: optimizer.clip(0.0)))
    said.append(refusal(lambda: optimizer.load_state_dict({})))
    take_step(pipe, *([torch.zeros(3, dtype=torch.long)] * 4 for _ in range(2)), reduce=False)
    said.append(refusal(lambda: optimizer.step(0.1)))
    pipe.close()
    return said


@pytest.mark.slow
def test_views_that_do_not_fit_are_refused_on_all_ranks() -> None:
    first, second = check(run_ranks(2, refused))
    assert "rank 1 could not agree: parameter 5.norm.weight of stage 0 trains" in first[0]
    assert "parameter 5.norm.weight of stage 0 trains, and its views (none)" in second[0]
    for said in (first, second):
        assert "do not have each of its 384 elements once" in said[1]
        assert "differ in the names and shapes of tensors that they divide (" in said[2]
        assert "give views that name and cut parameters alike" in said[2]
        assert "model.extra is of a tensor that no stage of this rank has" in said[3]
        assert "two tensors of this rank have the name model.norm.weight" in said[4]
        assert "max_norm is more than 0" in said[5]
        assert "not one of this rank's" in said[6]
        assert "no_sync()" in said[7]


def lose_a_rank(rank: int) -> str:
    placed = place(rank, Layout(dp=2))
    optimizer = ShardedOptimizer(placed.pipe, placed.views)
    placed.step(0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.step(0.1)
        optimizer.zero_grad()
        placed.step(1)
    except RankLostError as error:
        return str(error)
    return "not noticed"


@pytest.mark.slow
def test_a_rank_that_is_killed_before_its_update_is_named_by_the_step_that_gathers_it() -> None:
    first, second = run_ranks(2, lose_a_rank)
    assert second.exitcode == -signal.SIGKILL
    assert first.ok, str(first)
    assert first.value is not None
    assert "rank 1" in first.value
