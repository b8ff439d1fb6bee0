"""The losses of a stage besides the main one: auxiliary ones, and further ones that are told by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

MAIN = "main"
"""What the loss of `loss_fn` is called among those that are told by name."""

AUX_LOSS = "aux_loss"
"""What auxiliary losses are called. A value of a layer of this name, which nobody reads, is one."""


class OwnLoss(NamedTuple):
    """A loss that a stage adds to its micro-batch's. `aux`: a mean over tokens, which is scaled apart."""

    loss: Tensor
    aux: bool = False


class FurtherLoss(NamedTuple):
    """A loss that counts `weight` times beside the main one, and that `StepReport.by_name` has, unweighted.

    Example:
        >>> import torch
        >>> FurtherLoss("z_loss", torch.tensor(2.0), weight=0.5).weighted()
        tensor(1.)

    """

    name: str
    loss: Tensor
    weight: float = 1.0

    def weighted(self) -> Tensor:
        """Returns what it adds to the loss of its micro-batch."""
        return self.loss * self.weight


class StageOutput(NamedTuple):
    """What a stage may return instead of its output, or `loss_fn` instead of its loss: with losses besides.

    The `further` ones are scaled like the main one. `aux_loss` is a mean over the tokens of a micro-batch, and is
    averaged over micro-batches and replicas, whatever number of tokens the main one is divided by.

    Example:
        >>> import torch
        >>> class Routed(torch.nn.Linear):
        ...     def forward(self, x):
        ...         y = super().forward(x)
        ...         return StageOutput(y, aux_loss=0.01 * y.square().mean())
        >>> Routed(2, 2)(torch.zeros(1, 2)).output.shape
        torch.Size([1, 2])

    """

    output: Any
    aux_loss: Tensor | None = None
    further: tuple[FurtherLoss, ...] = ()


def split_off(made: Any, note: Callable[[str, Tensor], None]) -> tuple[Any, tuple[OwnLoss, ...]]:
    """Returns (output, weighted losses besides) of what a stage or `loss_fn` returned; `note` gets those with names."""
    if not isinstance(made, StageOutput):
        return made, ()
    losses = [] if made.aux_loss is None else [OwnLoss(made.aux_loss, aux=True)]
    for loss in made.further:
        _check(loss)
        note(loss.name, loss.loss.detach())
        losses.append(OwnLoss(loss.weighted()))
    return made.output, tuple(losses)


def _check(loss: Any) -> None:
    if not isinstance(loss, FurtherLoss):
        raise ValueError(f"further losses are a tuple of treadle.runtime.FurtherLoss(name, loss, weight), got {loss!r}")
    if not isinstance(loss.name, str) or not loss.name or loss.name == MAIN:
        raise ValueError(f"a further loss has a name of its own, other than {MAIN!r}, got {loss.name!r}")
    if not isinstance(loss.loss, Tensor) or loss.loss.dim():
        got = f"a tensor of shape {tuple(loss.loss.shape)}" if isinstance(loss.loss, Tensor) else repr(loss.loss)
        raise ValueError(f"the loss {loss.name!r} is one number for a micro-batch, got {got}; return its sum or mean")
