"""The norm of all gradients of the model: each parameter counts once, on one rank of the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY
from treadle.ir.placement import Placement
from treadle.runtime.model.gradients import Gradients


def counted_here(
    modules: Mapping[int, nn.Module], placement: Placement, position: MeshPosition, gradients: Gradients
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (stage, name, parameter) of those that this rank counts.

    Of replicas the first counts, of the two copies of a stage that of the first pipe. An expert counts on the rank of
    the first expert group that owns it; a parameter of several stages in the lowest of them.
    """
    stages = dict(enumerate(placement.stages[position.pp_rank]))
    home: dict[nn.Parameter, int] = {}
    for chunk, module in modules.items():
        for param in module.parameters():
            home[param] = min(stages[chunk], home.get(param, stages[chunk]))
    home |= {param: tie.stages[0] for tie in gradients.ties for param in tie.params}
    for chunk, module in modules.items():
        for name, param in module.named_parameters():
            first = position.dp_rank < (position.ep if param in gradients.owned else 1)
            if first and placement.pipes[chunk] == 0 and home[param] == stages[chunk]:
                yield stages[chunk], name, param


def share_of_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return what these gradients add to the norm, for `norm_over`: the sum of powers, or the largest."""
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    low = [grad for grad in values if grad.numel() and grad.itemsize < 4]
    others = [grad for grad in values if grad.numel() and grad.itemsize >= 4]
    found = [*_norms(low, norm_type, torch.float32), *_norms(others, norm_type, None)]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.double() for norm in found])
    return norms.max() if norm_type == math.inf else (norms**norm_type).sum()


def _norms(grads: list[Tensor], norm_type: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """Return the norm of each, computed in `dtype`, with a copy of one at a time at most."""
    return torch._foreach_norm(grads, norm_type, dtype) if grads else ()


def norm_over(groups: Groups, share: Tensor, norm_type: float) -> Tensor:
    """Return the norm over all ranks, the same on each. `share` is on the CPU."""
    largest = norm_type == math.inf
    total = share.reshape(1).to(HOST_MEMORY, torch.float64)
    groups.pp_group.all_reduce(total, largest=largest)
    if groups.replica_group is not None:
        groups.replica_group.all_reduce(total, largest=largest)
    if largest:
        return total[0]
    if groups.copies_group is not None:
        total /= 2  # each pipeline is there with two of its ranks
    norm: Tensor = total[0] ** (1.0 / norm_type)
    return norm
