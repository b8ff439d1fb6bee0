"""Rotary positions: each pair of numbers of a head is turned by an angle that grows with the token's position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines), each [batch, tokens, 1, head_dim]. Angles are computed in float32.

    Number i of a head is turned together with number i + head_dim / 2.
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.unsqueeze(-1).float() * (1.0 / theta ** (even / head_dim))
    both = torch.cat([angles, angles], dim=-1).unsqueeze(2)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn [batch, tokens, heads, head_dim] by the angles of `rotary_tables`."""
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines
