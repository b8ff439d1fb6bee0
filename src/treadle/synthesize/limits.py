"""What a rank may hold: activations counted, or bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLimits:
    """The most that a rank holds at once. None is no limit.

    Args:
        max_activations: of (micro-batch, chunk), as `treadle.verify` counts them.
        memory_limit: bytes of activations, where the costs say what layers save.

    Raises:
        ValueError: a limit is below 1.

    Example:
        >>> MemoryLimits(max_activations=3).memory_limit is None
        True

    """

    max_activations: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_activations", "memory_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is a whole number from 1, got {value}; leave it out for no limit")
