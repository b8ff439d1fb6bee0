"""Muon whose matrices of one shape are orthogonalised together: experts have thousands of small ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BATCH = 2**24
"""The most elements of a batch, where it has more than one matrix."""


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon, with its state and its arithmetic, a batched GEMM where that has one for each matrix.

    A matrix has the bits of torch's where the device multiplies it alike in a batch, and differs by rounding else.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for shape, params in by_shape.items():
                most = matrices_of_batch(shape.numel())
                for first in range(0, len(params), most):
                    self._update(params[first : first + most], group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        momenta = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        made = orthogonalised(torch.stack([update.bfloat16() for update in updates]), group)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        rows, columns = params[0].shape
        scale = 0.2 * math.sqrt(max(rows, columns))
        if group["adjust_lr_fn"] == "original":
            scale = math.sqrt(max(1, rows / columns))
        torch._foreach_add_(params, list(made.unbind()), alpha=-group["lr"] * scale)


def matrices_of_batch(size: int) -> int:
    """Return how many matrices of so many elements are orthogonalised together at most."""
    return max(1, BATCH // size)


def orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the Newton-Schulz iterations of each matrix, [matrix, row, column]; overwrites them."""
    a, b, c = group["ns_coefficients"]
    tall = matrices.shape[1] > matrices.shape[2]
    norms = torch.stack(torch._foreach_norm(list(matrices.unbind()))).clamp_(min=group["eps"])
    made = matrices.div_(norms.view(-1, 1, 1))
    made = made.mT if tall else made
    for _ in range(group["ns_steps"]):
        gram = made @ made.mT
        made = torch.baddbmm(made, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), made, beta=a)
    return made.mT if tall else made
