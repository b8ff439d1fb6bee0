"""The order of samples: a permutation an epoch, cut into global batches that do not depend on the parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class GlobalBatches:
    """Yields the samples of each global batch: batch s takes places [s * size, (s + 1) * size) of all epochs in a row.

    Each epoch is a permutation of its own, so that each sample comes once an epoch; a batch may span two epochs. The
    state is the number of samples taken so far. It knows nothing of replicas, so it resumes on any number of them.
    """

    def __init__(self, num_samples: int, size: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError("there is no whole sample to train on; give more text, or a shorter training.seq_len")
        self.num_samples, self.size, self.seed = num_samples, size, seed

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Start at the first epoch; the iterator's state says where it is."""
        return GlobalBatchIterator(self)

    def at(self, taken: int) -> NDArray[np.int64]:
        """Return the samples of the batch after the first `taken` samples."""
        places = np.arange(taken, taken + self.size)
        epochs = places // self.num_samples
        batch = np.empty(self.size, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            own = epochs == epoch
            batch[own] = _permutation(self.seed, epoch, self.num_samples)[places[own] - epoch * self.num_samples]
        return batch


class GlobalBatchIterator(Iterator[NDArray[np.int64]]):
    """Where a run is in its batches. torchdata's loader saves and restores its state."""

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches, self._taken = batches, 0

    def __next__(self) -> NDArray[np.int64]:
        """Return the next global batch; there is always one."""
        batch = self._batches.at(self._taken)
        self._taken += self._batches.size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of samples taken."""
        return {"samples": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after so many samples."""
        self._taken = state["samples"]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num)
