"""The exchange of tokens between the ranks of an expert group, as autograd sees it.

An `Exchange` belongs to a layer but has no state of a micro-batch: what a dispatch did is in the `Routing` that goes
from segment to segment as a value. Without a group, or in a group of one, tokens stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.groups import Circle


class _Swap(torch.autograd.Function):
    """Rows to their ranks; in backward their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, party: Circle, send: list[int], receive: list[int]) -> Tensor:
        ctx.party, ctx.send, ctx.receive = party, send, receive
        return party.swap(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.party.swap(grad, ctx.receive, ctx.send), None, None, None


class RankOwned(nn.Module):
    """A module whose parameters no other rank of its expert group has; their gradients meet only those of the same."""


class Exchange(nn.Module):
    """Moves rows between the ranks of an expert group. A Pipeline gives it the group, before its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.party: Circle | None = None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.party.ranks) if self.party is not None else 1

    def counts(self, counts: Tensor) -> Tensor:
        """From how many rows go to each part of each rank, to how many come for each part of this one, from each."""
        if self.party is None:
            return counts
        each = [counts.numel() // self.size] * self.size
        return self.party.swap(counts.reshape(-1), each, each)

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Rows to their ranks, with gradients."""
        if self.party is None:
            return rows
        swapped: Tensor = _Swap.apply(rows, self.party, send, receive)  # type: ignore[no-untyped-call]
        return swapped
