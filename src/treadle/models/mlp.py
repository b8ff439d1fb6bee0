"""The gated MLP of dense layers, shared experts and MTP blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, for every token alike. Submodules have Hugging Face's names."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token becomes."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
