"""The whole model in one process, micro-batch by micro-batch, by plain torch: what pipelines are held to.

Nothing here knows of schedules. `Embed`, `Block`, `Bare` and `Head` are the stages of a small model whose hidden size
changes from stage to stage, so that a tensor that goes to the wrong stage does not fit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import treadle
from tests.support.devices import DEVICE_TYPE

VOCAB = 13
TOKENS = 3
SAMPLES = 2
"""Sequences in a micro-batch."""

SIZES = (8, 6, 10, 7)
"""Hidden sizes, over and over along the model."""


class Embed(nn.Module):
    """The first stage."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, size)
        self.linear = nn.Linear(size, size)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        out: Tensor = x + functional.gelu(self.linear(x))
        return out


class Block(nn.Module):
    """A stage in the middle: a norm, a linear, and a parameter of its own."""

    def __init__(self, size: int, to: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size + 3)
        self.w = nn.Parameter(torch.randn(size + 3, to) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(self.norm(x))) @ self.w


class Bare(nn.Module):
    """A stage in the middle without any `nn.Linear`."""

    def __init__(self, size: int, to: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.w = nn.Parameter(torch.randn(size, to) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.norm(x) @ self.w)


class Head(nn.Module):
    """The last stage."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


class Whole(nn.Module):
    """The only stage of a pipeline that has one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.head = Embed(size), Head(size)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


def make_stages(num_stages: int, *, middle: type[Block] | type[Bare] = Block, seed: int = 7) -> list[nn.Module]:
    """The model, the same one for the same seed."""
    torch.manual_seed(seed)
    sizes = [SIZES[i % len(SIZES)] for i in range(num_stages - 1)]
    if num_stages == 1:
        return [Whole(SIZES[0]).double()]
    stages = [Embed(sizes[0]), *(middle(a, b) for a, b in pairwise(sizes)), Head(sizes[-1])]
    return [stage.double() for stage in stages]


def make_batch(num_mb: int, replica: int = 0, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens after them, for one replica."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + replica)
    tokens = torch.randint(0, VOCAB, (num_mb * SAMPLES, TOKENS + 1), generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over a micro-batch."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    """The sum over a micro-batch."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def run_whole(
    stages: Sequence[Callable[..., Any]],
    microbatches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    num_tokens: float | None = None,
) -> list[float]:
    """The losses of all micro-batches of all replicas, auxiliary ones averaged; gradients are added to `.grad`."""
    scale = 1.0 / (num_tokens if num_tokens is not None else len(microbatches))
    tokens = 1.0 / (scale * len(microbatches))
    losses = []
    for inputs, target in microbatches:
        x, aux = inputs, list[Tensor]()
        for stage in stages:
            x = stage(*x) if isinstance(x, tuple) else stage(x)
            if isinstance(x, treadle.StageOutput):
                assert x.aux_loss is not None
                aux.append(x.aux_loss)
                x = x.output
        loss = loss_fn(x, target) + sum(aux) * tokens
        if loss.requires_grad:
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return losses


def cut(batches: Sequence[tuple[Tensor, Tensor]], num_mb: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of some replicas' batches."""
    return [pair for x, y in batches for pair in zip(x.chunk(num_mb), y.chunk(num_mb), strict=True)]


def grads_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor | None]:
    """The gradients by stage and name of the parameter; a tied parameter has several names."""
    return {
        f"{number}.{name}": None if p.grad is None else p.grad.detach().clone()
        for number, stage in sorted(stages.items())
        for name, p in stage.named_parameters(remove_duplicate=False)
    }


def worst(got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative difference of the gradients in `got`, and where; None is only equal to None."""
    found = (0.0, "")
    for name, grad in got.items():
        want = wanted[name]
        if grad is None or want is None:
            difference = 0.0 if grad is None and want is None else float("inf")
        elif grad.numel() == 0:
            difference = 0.0 if grad.shape == want.shape else float("inf")
        else:
            difference = float((grad - want).abs().max()) / max(float(want.abs().max()), 1e-300)
            difference = difference if difference == difference else float("inf")
        found = max(found, (difference, name))
    return found


def make_mesh(pp: int, dp: int = 1) -> DeviceMesh:
    """The mesh of all ranks."""
    if dp == 1:
        return init_device_mesh(DEVICE_TYPE, (pp,), mesh_dim_names=("pp",))
    return init_device_mesh(DEVICE_TYPE, (pp, dp), mesh_dim_names=("pp", "dp"))


def chunks_of(schedule: treadle.Schedule, pp_rank: int, stages: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """What `Pipeline` takes as stages: this rank's chunks."""
    return {chunk: stages[number] for chunk, number in enumerate(schedule.placement.stages[pp_rank])}
