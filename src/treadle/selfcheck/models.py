"""What the ranks of a check train: the whole model on each of them, and the part that is a rank's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from treadle.ir import Schedule
from treadle.moe import MoELayer

WIDTH, HIDDEN, NUM_EXPERTS, TOKENS = 16, 24, 4, 6
SIZES = (12, 8, 16, 10)
"""Widths of plain stages, over and over: a tensor that goes to the wrong stage does not fit there."""


@dataclass(frozen=True)
class MeshShape:
    """A mesh, and whether stages are MoE layers in segments or plain modules."""

    pp: int
    dp: int
    ep: int
    layered: bool

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in (("PP", self.pp), ("DP", self.dp), ("EP", self.ep)) if size > 1]
        return f"{' x '.join(sizes) or 'PP1'} of {'MoE layers' if self.layered else 'plain stages'}"

    @property
    def replicas(self) -> int:
        """Returns how many micro-batches go through the same stage at once."""
        return self.dp * self.ep


def whole_model(shape: MeshShape, num_stages: int, dtype: torch.dtype, device: torch.device) -> list[nn.Sequential]:
    """Return all stages with all experts; the same numbers on each rank."""
    torch.manual_seed(11)
    if shape.layered:
        stages: list[list[nn.Module]] = [
            [MoELayer(WIDTH, HIDDEN, NUM_EXPERTS, top_k=2, balance=0.1)] for _ in range(num_stages)
        ]
        stages[0].insert(0, nn.Linear(WIDTH, WIDTH))
        stages[-1].append(nn.Linear(WIDTH, WIDTH))
    else:
        sizes = [WIDTH, *(SIZES[at % len(SIZES)] for at in range(num_stages - 1)), WIDTH]
        stages = [[nn.LayerNorm(a), nn.Linear(a, b), nn.GELU()] for a, b in pairwise(sizes)]
    return [nn.Sequential(*stage).to(device, dtype) for stage in stages]


def own_stage(stage: nn.Sequential, ep: int, ep_rank: int) -> nn.Sequential:
    """Return a rank's part of a stage, with parameters of its own: of the experts those that it has."""
    parts: list[nn.Module] = []
    param = next(stage.parameters())
    for whole in stage:
        state = whole.state_dict()
        if isinstance(whole, MoELayer):
            mine: nn.Module = MoELayer(WIDTH, HIDDEN, NUM_EXPERTS, top_k=2, balance=0.1, ep=ep, ep_rank=ep_rank)
            assert isinstance(mine, MoELayer)
            first, num = mine.experts.first, len(mine.experts)
            for name in [name for name in state if name.startswith("experts.")]:
                value, pieces = state.pop(name), name.split(".")
                if first <= int(pieces[2]) < first + num:
                    pieces[2] = str(int(pieces[2]) - first)
                    state[".".join(pieces)] = value
        elif isinstance(whole, nn.Linear):
            mine = nn.Linear(whole.in_features, whole.out_features)
        elif isinstance(whole, nn.LayerNorm):
            mine = nn.LayerNorm(whole.normalized_shape)
        else:
            mine = nn.GELU()
        mine.to(param.device, param.dtype).load_state_dict(state)
        parts.append(mine)
    return nn.Sequential(*parts)


def grads_of(stage: nn.Sequential, own: nn.Sequential) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (name, the rank's gradient, that of the whole model) of each of a rank's parameters."""
    params = dict(stage.named_parameters())
    for name, param in own.named_parameters():
        want = params[name].grad
        if want is not None and want.shape != param.shape:  # experts: those of this rank
            layer = own[int(name.split(".")[0])]
            assert isinstance(layer, MoELayer)
            want = want[layer.experts.first : layer.experts.first + len(layer.experts)]
        yield name, param.grad, want


def make_batch(shape: MeshShape, schedule: Schedule, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: [replica, micro-batch, token, width]."""
    draw = torch.Generator().manual_seed(23)
    sizes = (2, shape.replicas, schedule.num_microbatches, TOKENS, WIDTH)
    inputs, targets = torch.randn(sizes, generator=draw, dtype=torch.float64).to(device, dtype)
    return inputs, targets


def train_whole(model: list[nn.Sequential], inputs: Tensor, targets: Tensor) -> float:
    """Trains all micro-batches of all replicas in one process; returns the loss."""
    num = inputs.shape[0] * inputs.shape[1]
    total = 0.0
    for x, target in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True):
        h, extra = x, torch.zeros((), dtype=x.dtype, device=x.device)
        for part in (part for stage in model for part in stage):
            if isinstance(part, MoELayer):
                h, loss = part.with_loss(h)
                extra = extra + loss
            else:
                h = part(h)
        share = (nn.functional.mse_loss(h, target) + extra) / num
        torch.autograd.backward(share)
        total += float(share.detach())
    return total
