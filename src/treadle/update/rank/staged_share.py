"""A source of tensors that all ranks draw in step, whole: each keeps its share of them in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from treadle.dist.streams import HOST_MEMORY
from treadle.update.memory.copying import copy
from treadle.update.rank.source import Source, dtype_name
from treadle.weights.tensor_boxes import Tensor


def staged_share(
    weights: Iterable[tuple[str, torch.Tensor]], rank: int, num_ranks: int, forms: Mapping[str, Tensor] | None = None
) -> Source:
    """Draw all weights, and keep those of this rank: each goes to the rank that has fewest bytes by then.

    All ranks draw the same names and shapes in the same order, so that they agree without a word. What is kept is a
    copy: the trainer may use the memory again.

    Args:
        weights: Names and whole tensors.
        rank: This rank, of those that draw.
        num_ranks: How many draw.
        forms: What engines hold, by name. A floating-point tensor is cast to the dtype there.

    """
    bytes_of = [0] * num_ranks
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        owner = min(range(num_ranks), key=bytes_of.__getitem__)
        bytes_of[owner] += tensor.numel() * tensor.element_size()
        if owner == rank:
            cast = tensor.detach().to(_dtype(name, tensor, forms))
            kept[name] = torch.empty(cast.shape, dtype=cast.dtype, device=HOST_MEMORY)
            copy(kept[name], cast)
    return Source.of(kept)


def _dtype(name: str, tensor: torch.Tensor, forms: Mapping[str, Tensor] | None) -> torch.dtype:
    form = forms.get(name) if forms is not None else None
    if form is None or form.dtype == dtype_name(tensor):
        return tensor.dtype
    wanted: torch.dtype = getattr(torch, form.dtype)
    return wanted if wanted.is_floating_point and tensor.is_floating_point() else tensor.dtype
