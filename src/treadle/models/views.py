"""Where the tensors of a Hugging Face checkpoint stand in a rank's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True)
class NamedView:
    """One tensor of a checkpoint: `tensor[index]` of a parameter or buffer, under its name in the whole model.

    Fused parameters are several: expert 3's `gate_proj` is `(3, slice(0, hidden))` of the experts' `up.weight`. The
    index takes whole rows of the parameter, so that a view is one contiguous run of its elements.

    Example:
        >>> import torch
        >>> fused = torch.nn.Parameter(torch.arange(12.0).reshape(2, 3, 2))
        >>> view = NamedView("experts.1.gate_proj.weight", fused, (1, slice(0, 2)))
        >>> view.of(fused).tolist(), view.run
        ([[6.0, 7.0], [8.0, 9.0]], (6, 10))

    """

    name: str
    """The tensor's name in the whole model, Hugging Face's: `model.layers.3.self_attn.q_proj.weight`."""

    tensor: Tensor
    index: Index = ()

    def of(self, alike: Tensor) -> Tensor:
        """Return the view's part of a tensor with the shape of its parameter: a gradient, a master, a moment."""
        return alike[self.index] if self.index else alike

    @property
    def run(self) -> tuple[int, int]:
        """The elements (first, past the last) of the flattened parameter that the view is."""
        part = self.of(self.tensor)
        first = int(part.storage_offset() - self.tensor.storage_offset())
        return first, first + part.numel()
