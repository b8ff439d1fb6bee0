"""Experts by their names in a checkpoint: an entry for each, where the parameter holds all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from treadle.moe import Experts
from treadle.runtime.model.grouped_linear import GroupedLinear


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """Each name of the module's state dict, its parameter, and which part of it is meant; None: all of it."""
    grouped = {id(part.weight) for part in module.modules() if isinstance(part, GroupedLinear)}
    for name, param in module.named_parameters():
        if id(param) in grouped:
            for number in range(len(param)):
                yield f"{name.removesuffix('weight')}{number}.weight", param, number
        else:
            yield name, param, None


def of_part(whole: Tensor | None, number: int | None) -> Tensor | None:
    """A parameter's gradient, or that of a part of it."""
    return whole if whole is None or number is None else whole[number]


def named_grads(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """The gradients of all parameters, by the names of the state dict."""
    for name, param, number in named_parts(module):
        yield name, of_part(param.grad, number)


def take_own(mine: Experts, whole: Experts) -> None:
    """Copies a rank's own experts out of all."""
    own = slice(mine.first, mine.first + len(mine))
    with torch.no_grad():
        mine.up.weight.copy_(whole.up.weight[own])
        mine.down.weight.copy_(whole.down.weight[own])
