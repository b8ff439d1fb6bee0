"""One chunk of a rank, as messages see it: what has come for it and what is to leave it, by micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.runtime.boundary import Boundary, boundary_of, fits
from weft.runtime.seeding import Seeds

Tensors: TypeAlias = tuple[Tensor, ...]
LossFn: TypeAlias = Callable[[Any, Any], Tensor]


class Chunk:
    """The module of stage `number`. `mb_offset` turns a micro-batch of its pipe into one of the global batch."""

    def __init__(self, number: int, module: nn.Module, seeds: Seeds | None, mb_offset: int) -> None:
        self.number, self.module, self.seeds, self.mb_offset = number, module, seeds, mb_offset
        self.loss_fn: LossFn | None = None
        self.boundary: Boundary | None = None
        self.header_due = True
        self.inputs: dict[int, Tensors] = {}
        self.targets: dict[int, Any] = {}
        self.outputs: dict[int, Tensors] = {}
        self.output_grads: dict[int, Tensors] = {}
        self.input_grads: dict[int, Tensors] = {}
        self.losses: dict[int, Tensor] = {}
        self._scales: dict[torch.dtype, Tensor] = {}

    def begin_step(self, scale: Tensor) -> None:
        """Forgets what a step that failed may have left; gradients of losses start at `scale`."""
        for left in (self.inputs, self.targets, self.outputs, self.output_grads, self.input_grads, self.losses):
            left.clear()
        self._scales = {scale.dtype: scale}

    def keep_shape(self, mb: int, outputs: Tensors) -> None:
        """All micro-batches cross to the next stage in the shape of the first, for which there is room."""
        if self.boundary is None:
            self.boundary = boundary_of(outputs)
        elif not fits(outputs, self.boundary):
            got, first = (", ".join(map(str, b)) for b in (boundary_of(outputs), self.boundary))
            raise ValueError(
                f"stage {self.number} returned {got} for micro-batch {mb}, but {first} before; all micro-batches have "
                "one shape: pad them, or make a new Pipeline for the new shape"
            )

    def scale_as(self, dtype: torch.dtype) -> Tensor:
        """The scale in the precision of a loss. Each is rounded from float64: losses of a step may differ in type.

        Lanes' threads may ask at once; the first to put its tensor in is the one that all of them get.
        """
        scales = self._scales
        made = scales.get(dtype)
        return made if made is not None else scales.setdefault(dtype, scales[torch.float64].to(dtype))


def check_losses(losses: Tensors) -> None:
    """Refuses what is not one number for a micro-batch."""
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"a loss is one number for a micro-batch, got {got}; return its sum or its mean")
