"""Randomness: dropout does not depend on the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.cases import (
    Grads,
    float_batch,
    hold,
    nearest,
    own_grads,
    pipeline,
    replica_of,
    schedule_of,
    square_loss,
)
from tests.support.oracle import (
    cut,
    grads_of,
    make_mesh,
)
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.seeding import seed_layer
from treadle.schedules import SCHEDULES

NUM_LAYERS = 12
SEED = 11


class Dropped(nn.Module):
    """A layer with dropout at two places, checkpointed if it is told to."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(self.linear(x)), 0.3)
        return x + functional.dropout(self.other(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.inner(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def dropout_layers(checkpointed: bool) -> list[nn.Module]:
    torch.manual_seed(10)
    return [nn.Dropout(0.2) if i % 4 == 2 else Dropped(checkpointed).double() for i in range(NUM_LAYERS)]


def dropout_stages(num_stages: int, *, checkpointed: bool) -> list[nn.Module]:
    layers, each = dropout_layers(checkpointed), NUM_LAYERS // num_stages
    return [nn.Sequential(*layers[i * each : (i + 1) * each]) for i in range(num_stages)]


def by_layer(grads: Grads, num_stages: int) -> Grads:
    """Gradients named by layer of the model, whatever the stages."""
    each = NUM_LAYERS // num_stages
    renamed = {}
    for name, grad in grads.items():
        stage, layer, rest = name.split(".", 2)
        renamed[f"{int(stage) * each + int(layer)}.{rest}"] = grad
    return renamed


def step_dropout(
    rank: int, pp: int, dp: int, listed: Sequence[tuple[str, int]], checkpointed: bool
) -> list[list[tuple[float, Grads]]]:
    """Two steps of each schedule."""
    del rank
    mesh, ran = make_mesh(pp, dp), []
    for name, vpp in listed:
        schedule = schedule_of(name, pp, 8, vpp)
        num_stages = schedule.placement.num_stages
        stages = dropout_stages(num_stages, checkpointed=checkpointed)
        pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
        steps = []
        for _ in range(2):
            torch.manual_seed(1)
            wanted = torch.rand(3), torch.rand(3)
            torch.manual_seed(1)
            before = torch.rand(3)
            loss = pipe.step(*float_batch(8, replica_of(mesh)))
            assert torch.equal(before, wanted[0])
            assert torch.equal(torch.rand(3), wanted[1]), "the caller's own random numbers went on from elsewhere"
            steps.append((float(loss), by_layer(own_grads(schedule, mesh, stages), num_stages)))
            for stage in stages:
                stage.zero_grad()
        ran.append(steps)
        pipe.close()
    return ran


def whole_dropout(dp: int, step: int, layers: Sequence[nn.Module]) -> tuple[float, Grads]:
    losses = []
    for mb, (x, y) in enumerate(cut([float_batch(8, replica) for replica in range(dp)], 8)):
        for number, layer in enumerate(layers):
            seed_layer(torch.get_default_device(), SEED, step, mb, number, len(layers))
            x = layer(x)
        loss = square_loss(x, y)
        (loss / (8 * dp)).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses), grads_of(dict(enumerate(layers)))


SOME = ("1f1b", "interleaved-overlap", "dualpipe", "zb-v")
"""A schedule of each placement."""


def dropout_sizes(pp: int, dp: int) -> list[tuple[str, int]]:
    """Every schedule and number of chunks for two ranks, some schedules for four."""
    found = []
    for name, family in SCHEDULES.items():
        if pp * dp > 2 and name not in SOME:
            continue
        for vpp in family.vpps or ((1, 2, 3) if pp * dp == 2 else (3,)):
            schedule = nearest(name, pp, 8, vpp)
            if schedule is not None and NUM_LAYERS % schedule.placement.num_stages == 0:
                found.append((name, vpp))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_dropout_does_not_depend_on_the_schedule(pp: int, dp: int) -> None:
    listed = dropout_sizes(pp, dp)
    if pp * dp == 2:
        assert {name for name, _ in listed} == set(SCHEDULES)
    wanted = [whole_dropout(dp, step, dropout_layers(False)) for step in range(2)]
    assert wanted[0][0] != pytest.approx(wanted[1][0], rel=1e-3)
    ranks = check(run_ranks(pp * dp, step_dropout, pp, dp, listed, False))
    for place, case in enumerate(listed):
        for step in range(2):
            hold([ran[place][step] for ran in ranks], wanted[step], note=(case, step))


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_activation_checkpointing_with_dropout(dp: int) -> None:
    listed = [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 2)]
    wanted = [whole_dropout(dp, step, dropout_layers(False)) for step in range(2)]
    ranks = check(run_ranks(2 * dp, step_dropout, 2, dp, listed, True))
    for place, case in enumerate(listed):
        for step in range(2):
            hold([ran[place][step] for ran in ranks], wanted[step], note=(case, step))


def layers_with_one_dropout() -> list[nn.Module]:
    """One dropout, used between any two layers, as it is often written."""
    torch.manual_seed(12)
    drop = nn.Dropout(0.4)
    return [nn.Linear(6, 6).double(), drop, nn.Linear(6, 6).double(), drop]


def step_one_dropout(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 8), make_mesh(2)
    stages = [nn.Sequential(*layers_with_one_dropout()), nn.Sequential(*layers_with_one_dropout())]
    pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
    return float(pipe.step(*float_batch(8))), own_grads(schedule, mesh, stages)


def test_one_dropout_module_at_several_places_of_a_stage() -> None:
    layers = [*layers_with_one_dropout(), *layers_with_one_dropout()]
    loss, grads = whole_dropout(1, 0, layers)
    renamed = {f"{int(n[0]) // 4}.{int(n[0]) % 4}{n[1:]}": g for n, g in grads.items()}
    hold(check(run_ranks(2, step_one_dropout)), (loss, renamed))


def chunks_with_one_dropout() -> list[nn.Module]:
    """The same dropout in the first and the last stage, which are on one rank in a V."""
    torch.manual_seed(14)
    drop, linears = nn.Dropout(0.4), [nn.Linear(6, 6).double() for _ in range(4)]
    return [nn.Sequential(linears[0], drop), *map(nn.Sequential, linears[1:3]), nn.Sequential(linears[3], drop)]


def step_chunks_with_one_dropout(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh, stages = schedule_of("zb-v", 2, 8), make_mesh(2), chunks_with_one_dropout()
    pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
    return float(pipe.step(*float_batch(8))), own_grads(schedule, mesh, stages)


def test_one_dropout_module_in_two_chunks_of_a_rank() -> None:
    stages = chunks_with_one_dropout()
    loss, _ = whole_dropout(1, 0, [layer for stage in stages for layer in cast(nn.Sequential, stage)])
    hold(check(run_ranks(2, step_chunks_with_one_dropout)), (loss, grads_of(dict(enumerate(stages)))))


def linears() -> list[nn.Module]:
    torch.manual_seed(15)
    return [nn.Linear(6, 6).double() for _ in range(8)]


def drop_behind(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _, given, made: functional.dropout(made, 0.3))


def step_late_dropout(rank: int, listed: Sequence[str]) -> list[tuple[float, Grads]]:
    """The first step has no dropout; hooks bring it, and others stand on the stages."""
    del rank
    mesh, ran = make_mesh(2), []
    for name in listed:
        schedule, layers = schedule_of(name, 2, 8), linears()
        each = len(layers) // schedule.placement.num_stages
        stages = [nn.Sequential(*layers[i : i + each]) for i in range(0, len(layers), each)]
        pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
        pipe.step(*float_batch(8))
        for stage in stages:
            stage.zero_grad()
            stage.register_forward_hook(lambda *_: None)
            stage.register_full_backward_hook(lambda *_: None)
        for layer in layers:
            drop_behind(layer)
        loss = float(pipe.step(*float_batch(8)))
        grads = own_grads(schedule, mesh, stages)
        ran.append((loss, {f"{int(n[0]) * each + int(n[2])}{n[3:]}": grad for n, grad in grads.items()}))
        pipe.close()
    return ran


def test_hooks_that_drop_do_not_depend_on_the_schedule() -> None:
    listed, layers = ["1f1b", "zb-v", "dualpipe"], linears()
    for layer in layers:
        drop_behind(layer)
    wanted = whole_dropout(1, 1, layers)
    ranks = check(run_ranks(2, step_late_dropout, listed))
    for place, name in enumerate(listed):
        hold([ran[place] for ran in ranks], wanted, note=name)
