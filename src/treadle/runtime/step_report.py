"""The result of a step, agreed on by all ranks: losses added up over them, and whether all is finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from treadle.dist.gathering import gather_json
from treadle.dist.groups import Group
from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY, Download
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.model.losses import AUX_LOSS, MAIN
from treadle.runtime.model.saved import SavedReport
from treadle.runtime.rank_part import RankPart

_PRIME = 65521  # sums of squares of remainders by it are exact in float64


@dataclass(frozen=True)
class StepReport:
    """The result of a step. All fields but `losses` and `saved` are the same on all ranks.

    `loss`: the number that `step` returned. `losses[mb]`: the unscaled loss of each micro-batch of this pipeline.
    `finite`: whether the loss and every gradient are finite, on all ranks. `reduced`: whether `.grad` is that of a
    single process; if not, it is this rank's share, which a later step outside `no_sync()` adds up. `saved`: the bytes
    that this rank's layers saved for backward, where they are counted. `by_name`: where stages have further losses (MTP
    blocks, `FurtherLoss`), each of them before its weight, and `main`, that of `loss_fn`, scaled as `loss` is; where
    they have auxiliary ones, `aux_loss`, their mean over micro-batches and replicas, which `loss` has in it. `norm`:
    the 2-norm of the whole gradient, where `step` was asked for it. `largest`: of each number that ranks gave `step`
    the largest.

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
    norm: Tensor | None = None
    largest: tuple[float, ...] = ()


class AgreedLosses(NamedTuple):
    """The loss of the global batch and its auxiliary part, the losses of this pipeline, and over all ranks numbers of
    bad gradients, of losses with names and of auxiliary ones; `alike`: all ranks scale alike. `norm` is that of the
    gradient, `largest` of each number the largest.
    """

    loss: Tensor
    aux_loss: Tensor
    losses: Tensor
    num_bad: int
    num_named: int
    num_aux: int
    alike: bool
    norm: Tensor
    largest: tuple[float, ...]


NUM_TOLD = 2
"""Numbers that a rank may give a step: all ranks exchange as many, whether they give any or not."""


class OwnShare(NamedTuple):
    """What a rank adds to a step's agreement besides losses: to the square of the gradient's norm; own numbers.

    `again`: its next step or evaluation is a step, too.
    """

    norm: Tensor | None = None
    numbers: Sequence[float] = ()
    again: bool = False


class Counts(NamedTuple):
    """What a rank counted in a step: gradients that are not finite, losses with names, auxiliary losses."""

    bad: int
    named: int
    aux: int


def agree(groups: Groups, own: Tensor, numbers: Sequence[float], scale: float, counts: Counts) -> AgreedLosses:
    """Return what all ranks have in common after a step, by one reduction along the pipeline and one over replicas.

    It sums float64 in the order of micro-batches, so the loss does not depend on the schedule. `own` is on the CPU: the
    losses, one a micro-batch and then the sum of the auxiliary ones among them, and the share of the squared norm.
    """
    remainder, num = float(hash(scale) % _PRIME), len(own) - 2
    said = own.new_tensor([*counts, 1.0, remainder, remainder**2])
    both, largest = _reduced(groups.pp_group, torch.cat([own, said]), own.new_tensor(numbers))
    losses, aux, squared = both[:num], both[num], both[num + 1]
    total = torch.cat([torch.stack([losses.sum() * scale, aux * scale, squared]), both[num + 2 :]])
    if groups.replica_group is not None:
        total, largest = _reduced(groups.replica_group, total, largest)
    if groups.copies_group is not None:
        total[:3] /= 2  # each pipeline is there with two of its ranks
    loss, aux, squared, bad, named, num_aux, num_ranks, plain, square = total
    alike = bool(num_ranks * square == plain * plain)
    return AgreedLosses(
        loss,
        aux,
        losses,
        int(bad) if alike else 0,
        int(named),
        int(num_aux),
        alike,
        squared.sqrt(),
        tuple(largest.tolist()),
    )


def _reduced(group: Group, sums: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, and of numbers the largest, over a group, by one reduction: each rank's numbers have a row."""
    rows = numbers.new_zeros(len(group.ranks), len(numbers))
    rows[group.group_rank] = numbers
    both = torch.cat([sums, rows.flatten()])
    group.all_reduce(both)
    return both[: len(sums)], both[len(sums) :].view_as(rows).amax(0)


def agree_by_name(groups: Groups, named: Mapping[str, float], scale: float) -> dict[str, float]:
    """Return the losses of the global batch by name; `named` are the sums of those that this rank has."""
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


def report_of(
    part: RankPart,
    stages: Mapping[int, Chunk],
    scale: float,
    mean: float,
    num_bad: int,
    saved: SavedReport | None,
    share: OwnShare,
) -> tuple[StepReport, bool]:
    """Agree with all ranks on the loss; return the report, and whether all ranks step again.

    `mean` is the scale of the mean over micro-batches.
    """
    home = part.joined.device if part.joined.device.type != "meta" else HOST_MEMORY  # meta tensors carry no numbers
    own, num_aux = _own_losses(part, stages, mean / scale, home)
    named = [(name, loss) for stage in stages.values() for mb in stage.microbatches() for name, loss in mb.named]
    counts = Counts(num_bad, sum(name != MAIN for name, _ in named), num_aux)
    squared = share.norm if share.norm is not None and not share.norm.is_meta else own.new_zeros(())
    own = Download(torch.cat([own, squared.reshape(1)])).tensor(part.joined.waits.await_event)
    numbers = [*share.numbers, *[0.0] * (NUM_TOLD - len(share.numbers)), float(not share.again)]
    with part.joined.guard.together("the agreement on the loss"):
        agreed = agree(part.agreed.groups, own, numbers, scale, counts)
    if not agreed.alike:
        raise ValueError(
            "ranks gave different num_tokens; it is the count of the whole global batch, the same on every rank"
        )
    finite = agreed.num_bad == 0 and bool(agreed.loss.isfinite())
    loss, losses = agreed.loss.to(home), agreed.losses.to(home)
    by_name = _by_name(part, named, scale, home) if agreed.num_named else {}
    if agreed.num_aux:
        by_name = {MAIN: loss - agreed.aux_loss.to(home), **by_name, AUX_LOSS: agreed.aux_loss.to(home)}
    part.joined.guard.resume()
    norm = agreed.norm.to(home) if share.norm is not None else None
    largest = agreed.largest[: len(share.numbers)]
    report = StepReport(loss, losses, finite, part.gradients.reduced, saved, by_name, norm, largest)
    return report, agreed.largest[-1] == 0


def _own_losses(part: RankPart, stages: Mapping[int, Chunk], tokens: float, home: torch.device) -> tuple[Tensor, int]:
    """Return this rank's losses, one a micro-batch and then the sum of the auxiliary ones, and how many these are.

    `tokens` are those of a micro-batch, on average.
    """
    schedule, num_aux = part.agreed.plan.schedule, 0
    num, per_pipe = schedule.num_microbatches, schedule.microbatches_per_pipe
    losses = torch.zeros(num + 1, dtype=torch.float64, device=home)
    for chunk, stage in stages.items():
        for microbatch in stage.microbatches() if part.joined.device.type != "meta" else ():
            for own in microbatch.losses:
                share = own.loss.double() * tokens if own.aux else own.loss
                losses[schedule.placement.pipes[chunk] * per_pipe + microbatch.mb] += share
                if own.aux:
                    losses[num] += share
                    num_aux += 1
    return losses, num_aux


def _by_name(part: RankPart, named: list[tuple[str, Tensor]], scale: float, home: torch.device) -> dict[str, Tensor]:
    """Add the losses that have names up over all ranks."""
    names = list(dict.fromkeys(name for name, _ in named))
    sums = torch.zeros(len(names), dtype=torch.float64, device=home)
    for name, loss in named if part.joined.device.type != "meta" else ():
        sums[names.index(name)] += loss
    own = dict(zip(names, Download(sums).tensor(part.joined.waits.await_event).tolist(), strict=True))
    with part.joined.guard.together("the agreement on the loss"):
        by_name = agree_by_name(part.agreed.groups, own, scale)
    return {name: torch.tensor(loss, dtype=torch.float64, device=home) for name, loss in by_name.items()}
