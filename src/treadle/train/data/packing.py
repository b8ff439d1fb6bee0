"""Packing: one row of documents, cut into samples of the same length.

    tokens     a b c $ d e $ f g h i $ ...         $ ends a document
    sample 0   a b c $ d e                          of seq_len 6; its targets are one token ahead
    targets    b c $ - e $                          -: nothing is predicted across documents
    positions  0 1 2 3 0 1                          they restart with each document, and with each sample
    documents  0 0 0 0 1 1                          a token attends to tokens of its own document

Each token but the first is a target once an epoch, unless it starts a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""A target that does not count, as in torch's cross entropy."""


@dataclass(frozen=True)
class PackedSample:
    """One or several samples: [seq_len] each, or [samples, seq_len]."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


@dataclass(frozen=True)
class PackedTokens:
    """Documents in one row. Sample i starts at token i * seq_len.

    Example:
        >>> packed = PackedTokens(np.array([7, 8, 9, 0, 5, 6, 0, 3]), np.array([0, 4, 7]), seq_len=6)
        >>> packed.sample(0).targets.tolist(), packed.sample(0).positions.tolist()
        ([8, 9, 0, -100, 6, 0], [0, 1, 2, 3, 0, 1])

    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    seq_len: int

    def __len__(self) -> int:
        """Return how many samples there are; tokens after the last whole one are left out."""
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def sample(self, index: int) -> PackedSample:
        """Return a sample. -1 is an empty one, whose targets do not count: it fills a batch up."""
        if index < 0:
            nothing = torch.zeros(self.seq_len, dtype=torch.long)
            return PackedSample(nothing, torch.full_like(nothing, IGNORED), torch.arange(self.seq_len), nothing)
        first, length = index * self.seq_len, self.seq_len
        tokens = self.tokens[first : first + length + 1].astype(np.int64)
        is_start = np.zeros(length + 1, bool)
        is_start[self.starts[slice(*np.searchsorted(self.starts, (first + 1, first + length + 1)))] - first] = True
        targets = np.where(is_start[1:], IGNORED, tokens[1:])
        place = np.arange(length)
        begun = np.maximum.accumulate(np.where(is_start[:-1], place, 0))
        arrays = (tokens[:-1], targets, place - begun, np.cumsum(is_start[:-1]))
        return PackedSample(*map(torch.from_numpy, arrays))

    def samples(self, indices: NDArray[np.int64]) -> PackedSample:
        """Return several samples, stacked."""
        each = [self.sample(int(index)) for index in indices]
        names = ("inputs", "targets", "positions", "documents")
        return PackedSample(*(torch.stack([getattr(one, name) for one in each]) for name in names))

    def num_targets(self, indices: NDArray[np.int64]) -> int:
        """Return the number of targets that count in some samples, without reading their tokens."""
        real = indices[indices >= 0]
        first = real * self.seq_len + 1
        start, stop = np.searchsorted(self.starts, first), np.searchsorted(self.starts, first + self.seq_len)
        return int(len(real) * self.seq_len - (stop - start).sum())

    def num_targets_of_first(self, num: int) -> int:
        """Return the number of targets that count in the first `num` samples, or in all if there are fewer."""
        num = min(num, len(self))
        start, stop = np.searchsorted(self.starts, (1, num * self.seq_len + 1))
        return int(num * self.seq_len - (stop - start))
