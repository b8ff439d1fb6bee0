"""The block that predicts one more token, with a loss of its own (multi-token prediction)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class MTPBlock(nn.Module):
    """The base of blocks that stand behind a model's layers, before its head, and add a loss of their own.

    A subclass has `forward(x, target)`, where x is what the layers hand on, or the hidden state of the block before
    this one, and target is that of the micro-batch; it returns (hidden, loss). Further parameters of `forward` are side
    values by their names. The head gets x as if the block were not there. The loss counts `loss_weight` times, scaled
    like the main one, and `StepReport.by_name` has it unweighted as `mtp_0`, `mtp_1`, .... All such blocks of a model
    stand on one stage, whose ranks need targets.

    Example:
        >>> import torch
        >>> class Next(MTPBlock):
        ...     def forward(self, x, target):
        ...         return x, (x - target).square().mean()
        >>> hidden, loss = Next(loss_weight=0.3)(torch.ones(2), torch.zeros(2))
        >>> float(loss)
        1.0

    """

    def __init__(self, *, loss_weight: float = 1.0) -> None:
        super().__init__()
        self.loss_weight = loss_weight

    def forward(self, x: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Returns the hidden state and the loss."""
        raise NotImplementedError(f"{type(self).__name__} is an MTPBlock without forward(x, target) -> (hidden, loss)")


def mtp_name(at: int) -> str:
    """Returns the name of the loss of a stage's block."""
    return f"mtp_{at}"
