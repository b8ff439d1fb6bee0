"""Precision: float32 sums, autocast, losses and gradients that are not finite."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import (
    Grads,
    float_batch,
    hold,
    own_grads,
    pipeline,
    replica_of,
    schedule_of,
    square_loss,
    take_step,
)
from tests.support.devices import drawn
from tests.support.oracle import (
    Embed,
    Head,
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

NUM_LOW = 300
"""Micro-batches that are too many for a sum in bfloat16: 256 + 1 is 256 there."""


class Low(nn.Module):
    """A linear, a norm and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.linear(x)) @ self.w) + x
        return out


def low_stages() -> list[nn.Module]:
    torch.manual_seed(8)
    return [Low().bfloat16() for _ in range(2)]


def low_batch(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    x = 1.0 + 0.1 * drawn(torch.randn, NUM_LOW * 2, 4, generator=generator)
    return x.bfloat16(), torch.zeros(NUM_LOW * 2, 4, dtype=torch.bfloat16)


def step_low(rank: int, name: str, dp: int, reduces: Sequence[bool]) -> tuple[float, Grads, list[bool]]:
    del rank
    schedule, mesh = schedule_of(name, 2, NUM_LOW), make_mesh(2, dp)
    stages = low_stages()
    pipe = pipeline(schedule, stages, mesh, square_loss)
    reduced = []
    for reduce in reduces:
        loss = take_step(pipe, *low_batch(replica_of(mesh)), reduce=reduce)
        assert pipe.report is not None
        reduced.append(pipe.report.reduced)
    return float(loss), own_grads(schedule, mesh, stages), reduced


def as_double(grads: Grads) -> Grads:
    return {name: None if g is None else g.double() for name, g in grads.items()}


@cache
def low_reference(dp: int, num_steps: int) -> tuple[Grads, float]:
    """The exact gradients, and how far from them one is who sums those of micro-batches, each in bfloat16, exactly.

    One who sums in bfloat16, as autograd does by itself, is much farther.
    """
    batches = [low_batch(replica) for replica in range(dp)]
    exact, once, naive = [stage.double() for stage in low_stages()], low_stages(), low_stages()
    doubles = [(x.double(), y.double()) for x, y in batches]
    for _ in range(num_steps):
        run_whole(exact, cut(doubles, NUM_LOW), square_loss)
    wanted = grads_of(dict(enumerate(exact)))
    summed = {name: torch.zeros_like(g) for name, g in wanted.items() if g is not None}
    for microbatch in cut(batches, NUM_LOW) * num_steps:
        for stages in (once, naive):
            run_whole(stages, [microbatch], square_loss, num_tokens=NUM_LOW * dp)
        for name, g in as_double(grads_of(dict(enumerate(once)))).items():
            assert g is not None
            summed[name] += g
        for stage in once:
            stage.zero_grad()
    bound = worst(summed, wanted)[0] + 2**-7
    assert worst(as_double(grads_of(dict(enumerate(naive)))), wanted)[0] > 3 * bound
    return wanted, bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dp", "reduces"),
    [("1f1b", 1, (True,)), ("zb-h1", 2, (True,)), ("1f1b", 2, (False, True)), ("zb-h1", 1, (True,))],
)
def test_gradients_of_bfloat16_are_summed_in_float32(name: str, dp: int, reduces: tuple[bool, ...]) -> None:
    wanted, bound = low_reference(dp, len(reduces))
    for _, grads, reduced in check(run_ranks(2 * dp, step_low, name, dp, reduces)):
        assert all(g is not None and g.dtype is torch.bfloat16 for g in grads.values())
        difference, where = worst(as_double(grads), wanted)
        assert difference <= bound, f"{where} differs by {difference}"
        assert reduced == [dp == 1 or reduce for reduce in reduces]


class Island(nn.Module):
    """Most of it in autocast's precision, and a product that is kept in float32, as routers are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.w = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear(self.norm(x)))
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.w


def autocast_stages(island: bool) -> list[nn.Module]:
    torch.manual_seed(9)
    middle: list[nn.Module] = [Island(8), Island(8)] if island else []
    return [nn.Sequential(Embed(8), *middle), nn.Sequential(*copy.deepcopy(middle), Head(8))]


def step_autocast(rank: int, island: bool) -> list[tuple[float, Grads]]:
    del rank
    mesh, ran = make_mesh(2), []
    for name in ("1f1b", "zb-h1"):
        schedule, stages = schedule_of(name, 2, 6), autocast_stages(island)
        pipe = pipeline(schedule, stages, mesh, float_loss)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(*make_batch(6))
        ran.append((float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def float_loss(output: Tensor, target: Tensor) -> Tensor:
    return mean_loss(output.float(), target)


@pytest.mark.parametrize("island", [False, True])
def test_autocast_around_a_step(island: bool) -> None:
    """As torch has it, forward in autocast and backward outside: each backward then runs in its forward's precision."""
    stages = autocast_stages(island)
    plain = autocast_stages(island)
    run_whole(plain, cut([make_batch(6)], 6), float_loss)
    losses = []
    for x, y in cut([make_batch(6)], 6):
        with torch.autocast("cpu", torch.bfloat16):
            out = stages[1](stages[0](x))
            loss = float_loss(out, y)
        (loss / 6).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    wanted = sum(losses) / 6, grads_of(dict(enumerate(stages)))
    assert worst(wanted[1], grads_of(dict(enumerate(plain))))[0] > 1e-4, "autocast did nothing"
    ranks = check(run_ranks(2, step_autocast, island))
    for place, name in enumerate(("1f1b", "zb-h1")):
        hold([ran[place] for ran in ranks], wanted, most=1e-5, note=name)


def double_stages() -> list[nn.Module]:
    torch.manual_seed(15)
    return [nn.Linear(6, 6).double() for _ in range(2)]


def step_double(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh, stages = schedule_of("zb-h1", 2, 4), make_mesh(2), double_stages()
    pipe = pipeline(schedule, stages, mesh, square_loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(*float_batch(4))
    return float(loss), own_grads(schedule, mesh, stages)


def test_autocast_leaves_float64_alone() -> None:
    """As torch's does: what is meant to be exact stays so."""
    stages = double_stages()
    losses = run_whole(stages, cut([float_batch(4)], 4), square_loss)
    hold(check(run_ranks(2, step_double)), (sum(losses) / 4, grads_of(dict(enumerate(stages)))))


def weighted_loss(output: Tensor, target: tuple[Tensor, float]) -> Tensor:
    return mean_loss(output, target[0]) * target[1]


def step_nan(rank: int, name: str, dp: int) -> list[tuple[float, list[float], bool, bool]]:
    """A step with a NaN in the micro-batch 2 of replica 0, then one without."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    pipe = pipeline(schedule, stages, mesh, weighted_loss)
    seen = []
    for bad in (True, False):
        inputs, targets = make_batch(4, replica_of(mesh))
        weights = [float("nan") if bad and mb == 2 and replica_of(mesh) == 0 else 1.0 for mb in range(4)]
        loss = pipe.step(inputs, list(zip(targets.chunk(4), weights, strict=True)))
        assert pipe.report is not None
        grads = [p.grad for stage in pipe.stages.values() for p in stage.module.parameters()]
        finite = all(g is not None and bool(g.isfinite().all()) for g in grads)
        seen.append((float(loss), pipe.report.losses.tolist(), pipe.report.finite, finite))
        for stage in stages:
            stage.zero_grad()
    return seen


@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1)])
def test_a_nan_is_told_on_all_ranks(name: str, dp: int) -> None:
    ranks = check(run_ranks(2 * dp, step_nan, name, dp))
    for rank, (bad, good) in enumerate(ranks):
        loss, losses, finite, grads_finite = bad
        assert loss != loss
        assert not finite
        assert not grads_finite
        assert [mb for mb, x in enumerate(losses) if x != x] == ([2] if rank % dp == 0 else [])
        assert good[2]
        assert good[3]
        assert good[0] == good[0]


def overflow(rank: int) -> tuple[float, bool]:
    """A gradient that is infinite on the first rank only, under a loss that is finite."""
    schedule, mesh = schedule_of("1f1b", 2, 2), make_mesh(2)
    stages = make_stages(2)
    if rank == 0:
        parameter = next(stages[0].parameters())
        parameter.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
    pipe = pipeline(schedule, stages, mesh)
    loss = pipe.step(*make_batch(2))
    assert pipe.report is not None
    return float(loss), pipe.report.finite


def test_a_gradient_that_is_not_finite_is_told_on_all_ranks() -> None:
    for loss, finite in check(run_ranks(2, overflow)):
        assert loss == loss
        assert not finite
