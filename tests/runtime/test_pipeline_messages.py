"""What crosses between stages: several tensors, all kinds of tensors, auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support.cases import (
    MOST_DIFFERENCE,
    Grads,
    ended_soon,
    hold,
    nearest,
    own_grads,
    pipeline,
    refusal,
    replica_of,
    schedule_of,
    step_once,
)
from tests.support.oracle import (
    VOCAB,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
    sum_loss,
)
from tests.support.ranks import check, run_ranks
from treadle.schedules import SCHEDULES


class Many(nn.Module):
    """Passes on seven tensors: some get gradients, some are integers or flags, some are of no use to the next stage."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 6) if first else None
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        if self.table is not None:
            x: Tensor = self.table(tokens)
            y, mask, scale = self.other(x), tokens % 2 == 0, torch.linspace(0.5, 1.5, 6, dtype=x.dtype)
        else:
            x, y, mask, scale = rest[:4]
            y = y + self.other(x)
        x = x + torch.tanh(self.linear(x * scale)) * mask[..., None]
        return tokens, x, y, mask, scale, x * 2.0, tokens.to(torch.int32).t()


class ManyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, VOCAB)

    def forward(self, tokens: Tensor, x: Tensor, y: Tensor, mask: Tensor, scale: Tensor, *rest: Tensor) -> Tensor:
        assert mask.dtype is torch.bool
        assert rest[1].dtype is torch.int32
        assert torch.equal(rest[1].t().long(), tokens)
        assert not scale.requires_grad
        out: Tensor = self.linear(torch.cat([x * (tokens[..., None] + 1), y], dim=-1))
        return out


def many(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(6)
    stages = [*(Many(i == 0) for i in range(num_stages - 1)), ManyHead()]
    return [stage.double() for stage in stages]


def step_many(rank: int, pp: int, num_mb: int) -> list[tuple[str, float, Grads]]:
    del rank
    mesh, ran = make_mesh(pp), []
    for name in SCHEDULES:
        schedule = nearest(name, pp, num_mb)
        assert schedule is not None
        stages = many(schedule.placement.num_stages)
        pipe = pipeline(schedule, stages, mesh)
        for _ in range(2):  # the second time without headers
            loss = pipe.step(*make_batch(num_mb))
        ran.append((name, float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_several_tensors_between_stages(pp: int) -> None:
    num_mb = 2 * pp
    ranks = check(run_ranks(pp, step_many, pp, num_mb))
    for place, name in enumerate(SCHEDULES):
        schedule = nearest(name, pp, num_mb)
        assert schedule is not None
        stages = many(schedule.placement.num_stages)
        for _ in range(2):
            losses = run_whole(stages, cut([make_batch(num_mb)], num_mb), mean_loss)
        wanted = sum(losses) / num_mb, grads_of(dict(enumerate(stages)))
        hold([(loss, grads) for _, loss, grads in (ran[place] for ran in ranks)], wanted, note=name)


class Extra(nn.Module):
    """The first stage with one more output, of the kind that `what` says."""

    def __init__(self, stage: nn.Module, what: str) -> None:
        super().__init__()
        self.stage, self.what = stage, what

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x: Tensor = self.stage(tokens)
        kinds: dict[str, Callable[[], tuple[Tensor, ...]]] = {
            "no elements": lambda: (x, x[:0]),
            "no dimensions": lambda: (x, x.sum()),
            "the same again": lambda: (x, x),
            "its input": lambda: (x, tokens),
            "expanded": lambda: (x, x[:, :1].expand_as(x)),
            "transposed": lambda: (x, x.transpose(0, 1)),
            "complex": lambda: (x, x.to(torch.complex128)),
            "17 tensors": lambda: (x,) * 17,
            "9 dimensions": lambda: (x, x.reshape(1, 1, 1, 1, 1, 1, *x.shape)),
        }
        return kinds[self.what]()


class Takes(nn.Module):
    """The last stage, which adds the mean of what else comes."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        out: Tensor = self.stage(x)
        return out * (1 + sum(t.sin().mean() for t in rest if t.is_floating_point() and t.numel() > 0))


def step_extra(rank: int, listed: Sequence[str]) -> list[tuple[float, Grads]]:
    def make(what: str) -> list[nn.Module]:
        first, last = make_stages(2)
        return [Extra(first, what), Takes(last)]

    return [step_once(rank, "zb-h1", 4, 1, lambda what=what: make(what), mean_loss) for what in listed]  # type: ignore[misc]


def test_all_kinds_of_tensors_between_stages() -> None:
    listed = ["no elements", "no dimensions", "the same again", "its input", "expanded", "transposed"]
    ranks = check(run_ranks(2, step_extra, listed))
    for place, what in enumerate(listed):
        first, last = make_stages(2)
        stages = [Extra(first, what), Takes(last)]
        losses = run_whole(stages, cut([make_batch(4)], 4), mean_loss)
        hold([ran[place] for ran in ranks], (sum(losses) / 4, grads_of(dict(enumerate(stages)))), note=what)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("complex", "stage 0 returns torch.complex128, which cannot be sent; use one of float32"),
        ("17 tensors", "stage 0 returns 17 tensors; 16 is the most"),
        ("9 dimensions", "stage 0 returns a tensor of 9 dimensions; 8 is the most"),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(what: str, match: str) -> None:
    ended_soon(run_ranks(2, step_extra, [what]), 0, match)


class WithAux(nn.Module):
    """A stage with an auxiliary loss; the first has none."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> treadle.StageOutput:
        out = self.stage(x)
        return treadle.StageOutput(out, 0.01 * (out**2).mean())


def with_aux(num_stages: int) -> list[nn.Module]:
    first, *rest = make_stages(num_stages)
    return [first, *map(WithAux, rest)]


def step_aux(rank: int, dp: int, num_tokens: float | None) -> list[tuple[float, Grads, list[float]]]:
    del rank
    mesh, ran = make_mesh(2, dp), []
    for name in SCHEDULES:
        schedule = nearest(name, 2, 4)
        assert schedule is not None
        stages = with_aux(schedule.placement.num_stages)
        pipe = pipeline(schedule, stages, mesh, sum_loss if num_tokens is not None else mean_loss)
        loss = pipe.step(*make_batch(4, replica_of(mesh)), num_tokens=num_tokens)
        assert pipe.report is not None
        ran.append((float(loss), own_grads(schedule, mesh, stages), pipe.report.losses.tolist()))
        pipe.close()
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "num_tokens"), [(1, None), (2, None), (1, 23.0), (2, 48.0)])
def test_auxiliary_losses_and_sums_over_tokens(dp: int, num_tokens: float | None) -> None:
    ranks = check(run_ranks(2 * dp, step_aux, dp, num_tokens))
    loss_fn = sum_loss if num_tokens is not None else mean_loss
    for place, name in enumerate(SCHEDULES):
        schedule = nearest(name, 2, 4)
        assert schedule is not None
        stages = with_aux(schedule.placement.num_stages)
        losses = run_whole(stages, cut([make_batch(4, r) for r in range(dp)], 4), loss_fn, num_tokens=num_tokens)
        scale = num_tokens if num_tokens is not None else len(losses)
        wanted = sum(losses) / scale, grads_of(dict(enumerate(stages)))
        hold([ran[place][:2] for ran in ranks], wanted, note=name)
        for rank, ran in enumerate(ranks):
            own = losses[4 * (rank % dp) :][:4]
            assert ran[place][2] == pytest.approx(own, rel=MOST_DIFFERENCE), (name, rank)


def different_num_tokens(rank: int) -> tuple[str, str]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    pipe = pipeline(schedule, make_stages(2), mesh, sum_loss)
    inputs, targets = make_batch(4)
    apart = refusal(lambda: pipe.step(inputs, targets, num_tokens=24 + rank))
    half = refusal(lambda: pipe.step(inputs, targets, num_tokens=24 if rank else None))
    return apart, half


def test_different_num_tokens_are_refused() -> None:
    for said in check(run_ranks(2, different_num_tokens)):
        for text in said:
            assert "different num_tokens" in text
            assert "same on every rank" in text
