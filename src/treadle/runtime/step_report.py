"""Cuts a batch into micro-batches; adds the losses of a step up over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.dist.gathering import gather_json
from treadle.dist.rank_groups import Groups
from treadle.runtime.model.chunk import tensors_within
from treadle.runtime.model.saved import SavedReport

_PRIME = 65521  # sums of squares of remainders by it are exact in float64


def microbatches(given: Any, num: int, what: str) -> list[Any]:
    """Returns the micro-batches of a batch: a list, or a tensor that is cut along its first dimension."""
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
    """Returns the targets of each micro-batch; None for each if there are none, as a loss function may ignore them."""
    return [None] * num if given is None else microbatches(given, num, "targets")


def sides_of(side: Mapping[str, Any], num: int) -> list[dict[str, Any]]:
    """Returns the side values of each micro-batch."""
    cut = {name: microbatches(values, num, f"side values {name!r}") for name, values in side.items()}
    return [{name: values[mb] for name, values in cut.items()} for mb in range(num)]


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
    """The result of a step. All fields but `losses` and `saved` are the same on all ranks.

    `loss`: the number that `step` returned. `losses[mb]`: the unscaled loss of each micro-batch of this pipeline.
    `finite`: whether the loss and every gradient are finite, on all ranks. `reduced`: whether `.grad` is that of a
    single process; if not, it is this rank's share, which a later step outside `no_sync()` adds up. `saved`: the bytes
    that this rank's layers saved for backward, where they are counted. `by_name`: where stages have further losses (MTP
    blocks, `FurtherLoss`), each of them before its weight, and `main`, that of `loss_fn`, scaled as `loss` is; where
    they have auxiliary ones, `aux_loss`, their mean over micro-batches and replicas, which `loss` has in it.

    Example:
        >>> StepReport(torch.tensor(0.5), torch.tensor([0.25, 0.75]), finite=True, reduced=True).finite
        True

    """

    loss: Tensor
    losses: Tensor
    finite: bool
    reduced: bool
    saved: SavedReport | None = None
    by_name: dict[str, Tensor] = field(default_factory=dict)


class AgreedLosses(NamedTuple):
    """The loss of the global batch and its auxiliary part, the losses of this pipeline, and over all ranks numbers of
    bad gradients, of losses with names and of auxiliary ones; `alike`: all ranks scale alike.
    """

    loss: Tensor
    aux_loss: Tensor
    losses: Tensor
    num_bad: int
    num_named: int
    num_aux: int
    alike: bool


class Counts(NamedTuple):
    """What a rank counted in a step: gradients that are not finite, losses with names, auxiliary losses."""

    bad: int
    named: int
    aux: int


def agree(groups: Groups, losses: Tensor, scale: float, counts: Counts) -> AgreedLosses:
    """Returns what all ranks have in common behind a step.

    It sums float64 in the order of micro-batches, so the loss does not depend on the schedule. `losses` are on the CPU,
    one a micro-batch and then the sum of the auxiliary ones among them.
    """
    remainder = float(hash(scale) % _PRIME)
    said = losses.new_tensor([*counts, 1.0, remainder, remainder**2])
    both = torch.cat([losses, said])
    groups.pp_group.all_reduce(both)
    losses, aux = both[: len(losses) - 1], both[len(losses) - 1]
    total = torch.cat([torch.stack([losses.sum(), aux]) * scale, both[len(losses) + 1 :]])
    if groups.replica_group is not None:
        groups.replica_group.all_reduce(total)
    if groups.copies_group is not None:
        total[:2] /= 2  # each pipeline is there with two of its ranks
    loss, aux, bad, named, num_aux, num, plain, square = total
    alike = bool(num * square == plain * plain)
    return AgreedLosses(loss, aux, losses, int(bad) if alike else 0, int(named), int(num_aux), alike)


def agree_by_name(groups: Groups, named: Mapping[str, float], scale: float) -> dict[str, float]:
    """Returns the losses of the global batch by name; `named` are the sums of those that this rank has."""
    sums = dict(named)
    for group in (groups.pp_group, groups.replica_group):
        if group is None:
            continue
        rows = gather_json(group, sums)
        sums = {}
        for name, value in (pair for row in rows for pair in row.items()):
            sums[name] = sums.get(name, 0.0) + value
    each = 2 if groups.copies_group is not None else 1  # as in `agree`
    return {name: sums[name] * scale / each for name in sorted(sums)}
