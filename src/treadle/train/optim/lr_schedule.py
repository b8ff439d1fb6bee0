"""The learning rate of a step: warm-up, stable, decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayShape = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class WarmupStableDecay:
    """The learning rate rises linearly to `lr`, stays there, and falls to `final_lr` at the end of `steps`.

    `decay_shape` is the curve of the last `decay_steps`: linear, cosine, or sqrt (lr - (lr - final_lr) * sqrt(share)).
    The first step already has a rate above 0, and the step after the last would have `final_lr`.

    Example:
        >>> lr = WarmupStableDecay(lr=1.0, steps=10, warmup_steps=2, decay_steps=4)
        >>> [lr(step) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]

    """

    lr: float
    steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    final_lr: float = 0.0
    decay_shape: DecayShape = "linear"

    def __post_init__(self) -> None:
        """Refuse phases that do not fit."""
        if not self.lr > 0.0 or not 0.0 <= self.final_lr <= self.lr:
            raise ValueError(f"lr is more than 0 and final_lr from 0 to lr, got lr={self.lr}, final_lr={self.final_lr}")
        if self.steps < 1 or self.warmup_steps < 0 or self.decay_steps < 0:
            raise ValueError(
                f"steps is 1 or more, warmup_steps and decay_steps 0 or more, got {self.steps}, {self.warmup_steps}, "
                f"{self.decay_steps}"
            )
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"{self.warmup_steps} steps of warm-up and {self.decay_steps} of decay are more than the {self.steps} "
                "of the run; shorten them, or train longer"
            )
        if self.decay_shape not in ("linear", "cosine", "sqrt"):
            raise ValueError(f"decay_shape is linear, cosine or sqrt, got {self.decay_shape!r}")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        past = step - (self.steps - self.decay_steps)
        if past <= 0 or self.decay_steps == 0:
            return self.lr
        return self.lr - (self.lr - self.final_lr) * self._fallen(min(1.0, past / self.decay_steps))

    def _fallen(self, share: float) -> float:
        """Return which share of the way down is done after a share of the decay."""
        if self.decay_shape == "cosine":
            return (1.0 - math.cos(math.pi * share)) / 2.0
        return math.sqrt(share) if self.decay_shape == "sqrt" else share
