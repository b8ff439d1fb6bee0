"""What ranks agree on before a step whose micro-batches may have different shapes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY
from treadle.lowering.options import LoweringOptions
from treadle.runtime.agreement import digest_of
from treadle.runtime.model.exchange import Exchange
from treadle.runtime.model.input_shapes import InputShapes

_SAME, _DIFFER, _MIXED = range(3)

MIXED = (
    "ranks of an expert group got inputs of different shapes for the same micro-batch, but their layers exchange rows "
    "without counts (segments counts and host), so each expects as many as it sends; give the ranks of a group the "
    "same shapes in each micro-batch, or let the layers exchange counts"
)


def exchanges_blindly(modules: Iterable[nn.Module], shape: LoweringOptions | None, ep: int) -> bool:
    """Whether ranks of an expert group exchange rows without telling each other how many."""
    if ep == 1 or shape is None or not (shape.moe and shape.padded):
        return False
    return any(isinstance(part, Exchange) for module in modules for part in module.modules())


def agree_on_shapes(groups: Groups, shapes: InputShapes, *, blind: bool) -> tuple[bool, bool]:
    """Return (do micro-batches of this pipeline differ, do those of an expert group), the same on all ranks.

    `blind`: ranks of an expert group exchange rows without counts; else the second is not asked for.
    """
    said = _DIFFER if shapes.differ else _SAME
    if blind and shapes.each and _mixed(groups, shapes):
        said = _MIXED
    told = _tensor(said)
    groups.pp_group.all_reduce(told, largest=True)
    return int(told) != _SAME, int(told) == _MIXED


def _mixed(groups: Groups, shapes: InputShapes) -> bool:
    """Return whether the ranks of any expert group at this position have different inputs."""
    position, group = groups.position, groups.replica_group
    assert group is not None, "an expert group has replicas of everything else"
    rows = group.all_gather(_tensor(digest_of(shapes.each)))
    digests = dict(zip(group.ranks, map(int, rows), strict=True))
    row = [digests[rank] for rank in position.dp_ranks]
    return any(len({*row[first : first + position.ep]}) > 1 for first in range(0, len(row), position.ep))


def _tensor(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=HOST_MEMORY)
