"""Whatever draws random numbers in a step draws others in each step, micro-batch and replica, in any schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases import float_batch, pipeline, replica_of, schedule_of, square_loss
from tests.support.module_shapes import WIDTH, Layer
from tests.support.oracle import make_mesh
from tests.support.ranks import check, run_ranks

NUM_STEPS = 3
Drawn = list[float]
Place = Callable[[list[nn.Module], Drawn], Callable[[Tensor, Tensor], Tensor]]
"""Makes a model draw, late or early; returns its loss function. What is drawn goes into the list."""


def linears() -> list[nn.Module]:
    """Two stages of torch's own layers, which draw nothing."""
    return [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 6)).double() for _ in range(2)]


def single() -> list[nn.Module]:
    """Two stages that are one layer each."""
    return [nn.Linear(6, 6).double() for _ in range(2)]


def segmented() -> list[nn.Module]:
    """Two stages that run layer by layer."""
    to, back = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
    return [nn.Sequential(to, Layer(nn.Tanh())).double(), nn.Sequential(Layer(nn.Tanh()), back).double()]


def draw(drawn: Drawn, *_: object) -> None:
    drawn.append(float(torch.rand((), dtype=torch.float64)))


def by_loss(stages: list[nn.Module], drawn: Drawn) -> Callable[[Tensor, Tensor], Tensor]:
    del stages

    def loss(output: Tensor, target: Tensor) -> Tensor:
        draw(drawn)
        return square_loss(output, target)

    return loss


def by_hook(where: str, stages: list[nn.Module], drawn: Drawn) -> Callable[[Tensor, Tensor], Tensor]:
    last = cast(nn.Sequential, stages[-1])
    part = {"stage": last, "layer": last[-1]}[where]
    part.register_forward_hook(partial(draw, drawn))
    return square_loss


CASES: dict[str, tuple[Callable[[], list[nn.Module]], Place]] = {
    "loss behind one layer": (single, by_loss),
    "loss behind layers": (linears, by_loss),
    "loss behind segments": (segmented, by_loss),
    "hook on the stage": (linears, partial(by_hook, "stage")),
    "hook on a layer": (linears, partial(by_hook, "layer")),
}


def draw_in_steps(rank: int, name: str, pp: int, dp: int, num_mb: int) -> dict[str, list[Drawn]]:
    """What the rank drew in each step, by case."""
    del rank
    mesh, found = make_mesh(pp, dp), dict[str, list[Drawn]]()
    for case, (make, place) in CASES.items():
        schedule, drawn = schedule_of(name, pp, num_mb), Drawn()
        torch.manual_seed(7)
        stages = make()
        loss_fn = place(stages, drawn)
        parts = stages if pp == 2 else [nn.Sequential(*(layer for stage in stages for layer in children(stage)))]
        if pp == 1 and case == "hook on the stage":
            parts[0].register_forward_hook(partial(draw, drawn))
        pipe = pipeline(schedule, parts, mesh, loss_fn)
        found[case] = []
        for _ in range(NUM_STEPS):
            pipe.step(*float_batch(num_mb, replica_of(mesh)))
            found[case].append(list(drawn))
            drawn.clear()
        pipe.close()
    return found


def children(stage: nn.Module) -> Sequence[nn.Module]:
    return list(stage) if isinstance(stage, nn.Sequential) else [stage]


def numbers(ranks: Sequence[dict[str, list[Drawn]]], case: str, step: int) -> Drawn:
    """What all replicas drew in a step, sorted: schedules take micro-batches in different orders."""
    return sorted(number for rank in ranks for number in rank[case][step])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-h1", 1), ("1f1b", 2)])
def test_every_step_micro_batch_and_replica_draws_its_own_numbers(name: str, dp: int) -> None:
    ranks = check(run_ranks(2 * dp, draw_in_steps, name, 2, dp, 4 // dp))
    alone = check(run_ranks(1, draw_in_steps, "1f1b", 1, 1, 4))
    for case in CASES:
        drawn = [number for step in range(NUM_STEPS) for number in numbers(ranks, case, step)]
        assert len(set(drawn)) == len(drawn) == NUM_STEPS * 4, (case, drawn)
        if case != "hook on the stage":  # of another stage where there is one
            assert [numbers(ranks, case, step) for step in range(NUM_STEPS)] == [
                numbers(alone, case, step) for step in range(NUM_STEPS)
            ], case


def step_with_raised_dropout(rank: int) -> list[Drawn]:
    """What comes out of the same inputs in each step, with a dropout that begins at 0."""
    del rank
    torch.manual_seed(7)
    stages, seen, steps = linears(), Drawn(), list[Drawn]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(float(output.detach().sum()))
        return square_loss(output, target)

    pipe = pipeline(schedule_of("1f1b", 2, 2), stages, make_mesh(2), loss)
    for step in range(NUM_STEPS):
        if step == 1:
            for stage in stages:
                cast(nn.Dropout, cast(nn.Sequential, stage)[1]).p = 0.5
        pipe.step(torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64))
        steps.append(list(seen))
        seen.clear()
    return steps


def test_a_dropout_that_is_raised_drops_other_elements_in_each_step() -> None:
    _, (first, *raised) = check(run_ranks(2, step_with_raised_dropout))
    assert len(set(first)) == 1
    drawn = [output for step in raised for output in step]
    assert len(set(drawn)) == len(drawn) == 4, drawn


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target + torch.randn_like(target))


def train_on_noise(rank: int) -> float:
    """The mean of the last losses of a net that is trained on targets of noise alone."""
    del rank
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))]
    pipe = pipeline(schedule_of("1f1b", 1, 4), stages, make_mesh(1), noisy_loss)
    optimizer = torch.optim.AdamW(stages[0].parameters(), lr=3e-2)
    x, zeros = torch.randn(8, 6), torch.zeros(8, 6)
    losses = []
    for _ in range(80):
        losses.append(float(pipe.step(x, zeros)))
        optimizer.step()
        optimizer.zero_grad()
    return sum(losses[-20:]) / 20


def test_noise_in_the_loss_cannot_be_learned() -> None:
    """The variance of the noise is 1, which no net comes below."""
    (loss,) = check(run_ranks(1, train_on_noise))
    assert loss > 0.75
