"""What a pipeline must not do without a word: gradients that are not those of one process, or a refusal by name.

Precisions and counts are those of real models: bfloat16 beside float32, micro-batches in numbers that are no powers of
two, auxiliary losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from oracle import Embed, Head, cut, grads_of, make_batch, make_mesh, mean_loss
from ranks import check, run_ranks
from test_pipeline_cases import Grads, hold, own_grads, pipeline, schedule_of
from weft.runtime.segments import Segment, compute

MOST_FLOAT32 = 2e-6
"""Sums of float32 in another order differ by less."""


class Dense(nn.Module):
    """A layer in segments, with an auxiliary loss in bfloat16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def attn(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out

    def mlp(self, h: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = h + self.down(functional.gelu(self.up(h)))
        return out, low_loss(out)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h"),
            compute("mlp", self.mlp, reads="h", writes="x aux_loss"),
        ]

    def forward(self, x: Tensor) -> weft.Output:
        return weft.Output(*self.mlp(self.attn(x)))


def low_loss(out: Tensor) -> Tensor:
    return ((out**2).mean() / 3).to(torch.bfloat16)


class WithLowLoss(nn.Module):
    """A stage whose auxiliary loss is in bfloat16."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> weft.Output:
        out = self.stage(x)
        return weft.Output(out, low_loss(out))


def low_losses(num_stages: int, layered: bool) -> list[nn.Module]:
    torch.manual_seed(2)
    if layered:
        stages = [[Dense(8)] for _ in range(num_stages)]
        return [
            nn.Sequential(
                *([nn.Embedding(13, 8)] if at == 0 else []), *stage, *([Head(8)] if at == num_stages - 1 else [])
            )
            for at, stage in enumerate(stages)
        ]
    return [Embed(8), *(WithLowLoss(nn.Linear(8, 8)) for _ in range(num_stages - 2)), WithLowLoss(Head(8))]


def step_low_losses(rank: int, num_mb: int, dp: int, layered: bool) -> list[tuple[float, Grads]]:
    mesh, ran = make_mesh(2, dp), []
    for name in ("1f1b", "zb-v"):
        schedule = schedule_of(name, 2, num_mb)
        stages = low_losses(schedule.placement.num_stages, layered)
        pipe = pipeline(schedule, stages, mesh)
        loss = pipe.step(*make_batch(num_mb, rank % dp))
        ran.append((float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def whole_low_losses(stages: Sequence[nn.Module], microbatches: Sequence[tuple[Any, Any]]) -> tuple[float, Grads]:
    """The sum of all losses in float32, as none of them is rounded to another's precision."""
    total = 0.0
    for x, target in microbatches:
        aux = []
        for part in (part for stage in stages for part in (stage if isinstance(stage, nn.Sequential) else [stage])):
            x = part(x)
            if isinstance(x, weft.Output):
                aux.append(x.aux_loss.float())
                x = x.output
        loss = (mean_loss(x, target) + sum(aux)) / len(microbatches)
        torch.autograd.backward(loss)
        total += loss.item()
    return total, grads_of(dict(enumerate(stages)))


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(("num_mb", "dp"), [(3, 1), (6, 1), (3, 2)])
def test_each_loss_is_scaled_in_its_own_precision(num_mb: int, dp: int, layered: bool) -> None:
    """1/3 and 1/6 have no end in binary: rounded to bfloat16 for one loss they are 0.2 % off for the next."""
    ranks = check(run_ranks(2 * dp, step_low_losses, num_mb, dp, layered))
    microbatches = cut([make_batch(num_mb, replica) for replica in range(dp)], num_mb)
    for place, num_stages in enumerate((2, 4)):
        wanted = whole_low_losses(low_losses(num_stages, layered), microbatches)
        hold([ran[place] for ran in ranks], wanted, MOST_FLOAT32, note=place)
