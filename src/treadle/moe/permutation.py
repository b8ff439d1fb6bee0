"""Moves rows by an index. Gradients go back by the inverse index, so rows are never summed by atomics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.dist.streams import upload


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        return permuted(grad, inverse, index), None, None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.num_tokens = len(tokens)
        ctx.save_for_backward(order, place)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, place = ctx.saved_tensors
        each = permuted(grad, place, order).view(ctx.num_tokens, -1, grad.shape[-1])
        return each.sum(1), None, None, None  # two-byte types are added up in float32, and rounded once


def permuted(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return `rows[index]`; `index` is a permutation and `inverse` its inverse."""
    made: Tensor = _Permuted.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return made


def copied(tokens: Tensor, token: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Return `tokens[token]`, several rows for each token; row `place[i]` is the i-th (token, choice), `order[row]`."""
    made: Tensor = _Copied.apply(tokens, token, order, place)  # type: ignore[no-untyped-call]
    return made


def inverse_of(index: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=index.device))


def transposition(sizes: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the index that sorts rows by (j, i) that are sorted by (i, j), `sizes[i][j]` each.

    The host sends two numbers for each (i, j), and waits for nothing.

    Example:
        >>> transposition([[1, 2], [1, 0]], torch.device("cpu")).tolist()
        [0, 3, 1, 2]

    """
    num = np.asarray(sizes, np.int64)
    begin = (np.cumsum(num) - num.reshape(-1)).reshape(num.shape)  # of each run of rows, as they come
    turned = num.T.reshape(-1)
    shift = begin.T.reshape(-1) - (np.cumsum(turned) - turned)
    moved, counts = upload([shift.tolist(), turned.tolist()], torch.int64, device)
    total = int(turned.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(moved, counts, output_size=total)
