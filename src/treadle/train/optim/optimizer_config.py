"""What an optimizer is made with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

OptimizerName = Literal["adamw", "muon"]
MuonScaling = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices and AdamW for the rest. The learning rate comes with each step.

    Example:
        >>> config = OptimizerConfig(name="muon", weight_decay=0.1)
        >>> config.by_muon("model.layers.0.self_attn.q_proj.weight", 2), config.by_muon("lm_head.weight", 2)
        (True, False)
        >>> config.decay_of(1)
        0.0

    """

    name: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled, for tensors of two dimensions or more: norms and biases have none."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    """Newton-Schulz iterations of Muon."""

    muon_lr: MuonScaling = "match_rms_adamw"
    """How Muon scales the learning rate by a matrix' shape: match_rms_adamw lets one rate serve AdamW and Muon."""

    adamw_names: tuple[str, ...] = ("*embed*", "*lm_head*", "*shared_head.head*")
    """Matrices that AdamW updates under Muon, too: embeddings and heads."""

    bucket_mb: float = 64.0
    """Updated parameters travel between ranks in buckets of about so many megabytes."""

    def __post_init__(self) -> None:
        """Refuse values that are out of range."""
        names = ("adamw", "muon")
        if self.name not in names:
            raise ValueError(f"the optimizer is one of {', '.join(names)}, got {self.name!r}")
        if self.muon_lr not in ("original", "match_rms_adamw"):
            raise ValueError(f"muon_lr is original or match_rms_adamw, got {self.muon_lr!r}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas are two numbers from 0 to below 1, got {self.betas}")
        for name in ("eps", "weight_decay", "momentum"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is 0 or more, got {getattr(self, name)}")
        if not self.momentum < 1.0:
            raise ValueError(f"momentum is from 0 to below 1, got {self.momentum}")
        if not self.ns_steps >= 1:
            raise ValueError(f"ns_steps is 1 or more, got {self.ns_steps}")
        if not 0.0 < self.bucket_mb < math.inf:
            raise ValueError(f"bucket_mb is more than 0 and finite, got {self.bucket_mb}")

    def by_muon(self, name: str, num_dims: int) -> bool:
        """Return whether Muon updates the tensor with this name."""
        listed = any(fnmatchcase(name, pattern) for pattern in self.adamw_names)
        return self.name == "muon" and num_dims == 2 and not listed

    def decay_of(self, num_dims: int) -> float:
        """Return the weight decay of a tensor."""
        return self.weight_decay if num_dims >= 2 else 0.0
