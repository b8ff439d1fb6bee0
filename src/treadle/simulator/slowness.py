"""Ranks that are slower than others: the factor that multiplies all times of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.program import Longs

Factors: TypeAlias = npt.NDArray[np.float64]
"""A factor for each rank; 1.2 is 20 % slower."""


@dataclass(frozen=True)
class Stragglers:
    """Some ranks that are slower than all others: a share of them, by a factor. The share makes at least one rank.

    Raises:
        ValueError: the share is not from 0 to 1, or the factor below 1.

    Example:
        >>> sorted(Stragglers(share=0.25, factor=1.5).factors(8, seed=0).tolist())
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5]

    """

    share: float = 0.001
    factor: float = 1.2

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of stragglers is from 0 to 1 (0.001 is 0.1 %), got {self.share}")
        if not 1 <= self.factor <= 1000:
            raise ValueError(f"stragglers are slower by a factor from 1 to 1000, such as 1.2, got {self.factor}")

    def ranks(self, num_ranks: int, seed: int | Sequence[int]) -> Longs:
        """Draw which ranks are slow."""
        count = max(1, round(self.share * num_ranks)) if self.share > 0 else 0
        return np.sort(np.random.default_rng(seed).choice(num_ranks, count, replace=False))

    def factors(self, num_ranks: int, seed: int | Sequence[int]) -> Factors:
        """Draw which ranks are slow, and return the factor of each rank."""
        factors = np.ones(num_ranks)
        factors[self.ranks(num_ranks, seed)] = self.factor
        return factors

    def __str__(self) -> str:
        return f"{100 * self.share:.3g} % of ranks {self.factor:g} times slower"


def random_factors(num_ranks: int, slowness: float, seed: int | Sequence[int]) -> Factors:
    """Return a factor for each rank, slower by a random share of up to `slowness`.

    Raises:
        ValueError: `slowness` is no finite number from 0.

    """
    if not isinstance(slowness, int | float | np.number) or not 0 <= slowness < np.inf:
        raise ValueError(
            f"slowness is a share from 0, such as 0.05 for ranks up to 5 % slower, or an array with a factor for each "
            f"of {num_ranks} ranks, got {slowness!r}"
        )
    factors: Factors = 1.0 + slowness * np.random.default_rng(seed).random(num_ranks)
    return factors


def slow_factors(num_ranks: int, slowness: float, stragglers: Stragglers | None, seed: int) -> Factors | None:
    """Return the factor of each rank under both kinds of slowness, drawn independently; None if no rank is slower."""
    if stragglers is None:
        return random_factors(num_ranks, slowness, seed) if slowness else None
    return stragglers.factors(num_ranks, seed) * random_factors(num_ranks, slowness, (seed, 1))


def checked_factors(factors: Factors, num_ranks: int) -> Factors:
    """Return the factors, or raise a ValueError if they are not one for each rank."""
    checked = np.asarray(factors, np.float64)
    if checked.shape != (num_ranks,):
        raise ValueError(f"slowness is a factor for each of {num_ranks} ranks, got an array of shape {checked.shape}")
    if not (np.isfinite(checked) & (checked > 0)).all():
        raise ValueError("factors of slowness are finite numbers above 0, such as 1.2 for 20 % slower")
    return checked
