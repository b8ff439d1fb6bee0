"""Initial values that do not depend on how a model is cut: each tensor's come from the seed and its own name."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from treadle.models.tensor_names import views


@torch.no_grad()
def draw_initial_values(module: nn.Module, seed: int, std: float) -> None:
    """Fill a stage: matrices from a normal distribution, norms with ones, buffers with zeros.

    Numbers are drawn on the CPU in float32, so that every device and precision begins with the same ones.

    Args:
        module: a stage of `build_stages`.
        seed: the same seed makes the same model.
        std: the standard deviation, Hugging Face's `initializer_range`.

    """
    for buffer in module.buffers():
        buffer.zero_()
    for view in views(module):
        part = view.of(view.tensor)
        if not isinstance(view.tensor, nn.Parameter):
            continue
        if part.dim() < 2:
            part.fill_(1.0)
        else:
            drawn = torch.empty(part.shape, dtype=torch.float32, device="cpu")
            part.copy_(drawn.normal_(0.0, std, generator=_generator(seed, view.name)))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
