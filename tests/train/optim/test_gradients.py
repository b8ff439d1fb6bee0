"""Main gradients in shards: sums in float32, accumulated steps, steps that fail, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support.cases import replica_of, schedule_of, square_loss, take_step
from tests.support.devices import drawn
from tests.support.oracle import cut, grads_of, make_mesh, run_whole
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.train.layouts import Layout, Mixer, Placed, batch, place
from treadle.models.views import NamedView
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

NUM_LOW = 64
WIDTH = 8

Shards = dict[tuple[str, int], Tensor]
"""The gradients of a rank by tensor and first element."""


def shards_of(optimizer: ShardedOptimizer) -> Shards:
    found = ((piece.view.name, piece.run.first, piece.gradient) for piece in optimizer.pieces())
    return {(name, first): grad.clone() for name, first, grad in found if grad is not None}


def apart(got: Shards, wanted: Shards) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[key] - wanted[key]).abs().max()) for key in got)


def plus(one: Shards, other: Shards) -> Shards:
    keys = one.keys() | other.keys()
    return {key: sum((each[key] for each in (one, other) if key in each), torch.zeros(())) for key in keys}


# -- sums ------------------------------------------------------------------------------------------------------------


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) @ self.w


def low_model() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, WIDTH), Low(), nn.Linear(3, WIDTH), Low()).bfloat16()


def low_batch(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    x = 1.0 + 0.1 * drawn(torch.randn, NUM_LOW * 2, 3, generator=generator)
    return x.bfloat16(), torch.zeros(NUM_LOW * 2, 3, dtype=torch.bfloat16)


def step_low(rank: int, name: str) -> Shards:
    del rank
    schedule, mesh, model = schedule_of(name, 2, NUM_LOW), make_mesh(2, 2), low_model()
    at = mesh.get_local_rank("pp")
    stage = nn.Sequential(*list(model)[2 * at : 2 * at + 2])
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=square_loss, deadline_s=PATIENT_S)
    views = [NamedView(f"{at}.{name}", param) for name, param in stage.named_parameters()]
    optimizer = ShardedOptimizer(pipe, views, OptimizerConfig(bucket_mb=0.0001))
    pipe.step(*low_batch(replica_of(mesh)))
    assert all(param.grad is None for param in stage.parameters())
    shards = shards_of(optimizer)
    pipe.close()
    return shards


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_main_gradients_of_bfloat16_are_the_float32_sum_over_micro_batches(name: str) -> None:
    model = low_model()
    stages = [nn.Sequential(*list(model)[:2]), nn.Sequential(*list(model)[2:])]
    wanted = {
        f"{at}.{key}": torch.zeros(param.shape)
        for at, stage in enumerate(stages)
        for key, param in stage.named_parameters()
    }
    for microbatch in cut([low_batch(0), low_batch(1)], NUM_LOW):
        run_whole(stages, [microbatch], square_loss, num_tokens=NUM_LOW * 2)
        for key, grad in grads_of(dict(enumerate(stages))).items():
            assert grad is not None
            wanted[key] += grad.float()
        model.zero_grad()
    seen = dict.fromkeys(wanted, 0)
    for shards in check(run_ranks(4, step_low, name)):
        for (key, first), grad in shards.items():
            assert grad.dtype is torch.float32
            whole = wanted[key].reshape(-1)
            part = whole[first : first + grad.numel()]
            assert float((grad - part).abs().max()) <= 1e-6 * float(whole.abs().max()), key
            seen[key] += grad.numel()
    assert seen == {key: value.numel() for key, value in wanted.items()}, "each element is in one shard"


# -- steps that follow each other ------------------------------------------------------------------------------------


def run(placed: Placed, step: int, *, reduce: bool = True) -> None:
    placed.set_odd(step % 2 == 1)
    tokens, targets = batch(step, placed.pipe.position.dp)
    take_step(placed.pipe, list(tokens[placed.replica]), list(targets[placed.replica]), reduce=reduce)


def accumulate(rank: int, layout: Layout) -> tuple[float, float, float]:
    placed = place(rank, layout)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, OptimizerConfig(name="muon", bucket_mb=0.001))
    alone = []
    for step in (0, 1):
        run(placed, step)
        alone.append(shards_of(optimizer))
        optimizer.zero_grad()
    wanted = plus(*alone)
    run(placed, 0, reduce=False)
    run(placed, 1)
    local_first = apart(shards_of(optimizer), wanted)
    optimizer.zero_grad()
    run(placed, 0)
    run(placed, 1)
    reduced_twice = apart(shards_of(optimizer), wanted)
    with pytest.raises(ValueError, match="would mix reduced and local"):
        run(placed, 0, reduce=False)
    optimizer.zero_grad()
    run(placed, 1)
    again = apart(shards_of(optimizer), alone[1])
    placed.pipe.close()
    return local_first, reduced_twice, again


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout("dualpipe", pp=2, ep=2)], ids=str)
def test_steps_add_up_in_shards(layout: Layout) -> None:
    for differences in check(run_ranks(4, accumulate, layout)):
        assert max(differences) <= 1e-12


def fail(rank: int) -> list[float]:
    placed = place(rank, Layout())
    optimizer = ShardedOptimizer(placed.pipe, placed.views)
    run(placed, 0)
    first = shards_of(optimizer)
    optimizer.zero_grad()
    run(placed, 1)
    both = plus(first, shards_of(optimizer))
    optimizer.zero_grad()
    found = []
    for reduce in (True, False):
        before: list[Shards] = []
        for _ in range(2):  # a step that fails where there is nothing, and where there is something
            before.append(shards_of(optimizer))
            broken = _last_mixer(placed).register_full_backward_hook(_broken)
            with pytest.raises(RuntimeError, match="on purpose"):
                run(placed, 1, reduce=reduce)
            broken.remove()
            found.append(apart(shards_of(optimizer), before[-1]) if before[-1] else float(len(shards_of(optimizer))))
            if len(before) == 1:
                run(placed, 0, reduce=reduce)
        run(placed, 1)
        found.append(apart(shards_of(optimizer), both))
        optimizer.zero_grad()
    (param, *_) = placed.stages[0].parameters()
    run(placed, 1)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="which this optimizer does not read"):
        optimizer.step(lr=0.1)
    placed.pipe.close()
    return found


def _last_mixer(placed: Placed) -> nn.Module:
    return next(part for part in reversed(list(placed.stages[0].modules())) if isinstance(part, Mixer))


def _broken(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_a_step_that_fails_leaves_shards_as_they_were_and_grad_is_not_read() -> None:
    ((*differences,),) = check(run_ranks(1, fail))
    assert max(differences) <= 1e-12
