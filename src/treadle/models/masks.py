"""Which tokens a token sees: those before it, in its own document."""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(documents: Tensor) -> Tensor:
    """Return [batch, 1, tokens, tokens]: True where a token (row) sees another (column).

    Args:
        documents: [batch, tokens], a number for each token's document.

    Example:
        >>> document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    """
    num = documents.shape[-1]
    before = torch.ones(num, num, dtype=torch.bool, device=documents.device).tril()
    return ((documents.unsqueeze(-1) == documents.unsqueeze(-2)) & before).unsqueeze(1)


def positions_in(documents: Tensor) -> Tensor:
    """Return each token's position in its document, from 0. The tokens of a document stand together.

    Example:
        >>> positions_in(torch.tensor([[0, 0, 0, 7, 7, 2]])).tolist()
        [[0, 1, 2, 0, 1, 0]]

    """
    at = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    first: Tensor = torch.where(starts, at, 0).cummax(dim=-1).values
    return at - first
