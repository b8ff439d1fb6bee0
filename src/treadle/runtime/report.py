"""A step's inputs and targets as micro-batches, and the step's loss as all ranks see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.dist.rank_groups import Groups
from treadle.runtime.model.chunk import tensors_within
from treadle.runtime.model.saved import SavedReport

_PRIME = 65521  # sums of squares of remainders by it are exact in float64


def microbatches(given: Any, num: int, what: str) -> list[Any]:
    """The micro-batches of a batch: a list, or a tensor that is cut along its first dimension."""
    if isinstance(given, Tensor):
        if given.dim() == 0 or given.shape[0] % num or given.shape[0] == 0:
            size = given.shape[0] if given.dim() else "no dimension to cut"
            raise ValueError(
                f"{what} of {num} micro-batches are a batch that {num} divides, got {size}; "
                f"give a multiple of {num}, or a list of {num}"
            )
        return list(given.chunk(num))
    if isinstance(given, Sequence) and not isinstance(given, tuple):  # a tuple is one micro-batch of several tensors
        if len(given) != num:
            raise ValueError(f"the schedule has {num} micro-batches, got {len(given)} {what}")
        return list(given)
    raise ValueError(f"{what} are a tensor, or a list with one entry a micro-batch, got {type(given).__name__}")


def targets_of(given: Any, num: int) -> list[Any]:
    """The targets of each micro-batch; None for each where there are none, as a loss function may ignore them."""
    return [None] * num if given is None else microbatches(given, num, "targets")


def refuse_graph(given: Any, what: str) -> None:
    """Refuses inputs or targets that require a gradient: none would come back for them."""
    for tensor in tensors_within(given):
        if tensor.requires_grad:
            made_by = f"made by {tensor.grad_fn.name()}" if tensor.grad_fn is not None else "a leaf that requires one"
            raise ValueError(
                f"{what} require a gradient ({made_by}), but gradients do not leave a pipeline: what made them would "
                "not train; make it part of the first or the last stage, or give them as detach()"
            )


@dataclass(frozen=True)
class StepReport:
    """What a step came to, the same on all ranks but for `losses`, which are those of this pipeline.

    `loss`: what `step` returned. `losses[mb]`: each micro-batch's own, unscaled. `finite`: is the loss and every
    gradient finite, on all ranks. `reduced`: is `.grad` what a single process would have, or this rank's share that a
    later step with `reduce=True` adds up. `saved`: what this rank's layers saved for backward, where that is counted.
    """

    loss: Tensor
    losses: Tensor
    finite: bool
    reduced: bool
    saved: SavedReport | None = None


def agree(groups: Groups, losses: Tensor, scale: float, num_bad: int) -> tuple[Tensor, Tensor, int, bool]:
    """(loss of the global batch, this pipeline's losses, gradients that are not finite, do all ranks scale alike).

    Sums of float64 in the order of micro-batches, so the loss does not depend on the schedule.
    """
    remainder = float(hash(scale) % _PRIME)
    said = losses.new_tensor([num_bad, 1.0, remainder, remainder**2])
    both = torch.cat([losses, said])
    groups.pp_group.all_reduce(both)
    losses = both[: len(losses)]
    total = torch.cat([losses.sum().reshape(1) * scale, both[len(losses) :]])
    if groups.reduce_group is not None:
        groups.reduce_group.all_reduce(total)
    if groups.copies_group is not None:
        total[0] /= 2  # each pipeline is there with two of its ranks
    loss, bad, num, plain, square = total
    alike = bool(num * square == plain * plain)
    return loss, losses, int(bad) if alike else 0, alike
