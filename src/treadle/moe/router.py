"""Routing: which experts each token goes to.

A token has one row for each of its experts. Rows are sorted by expert, so the rows from one rank to another are
contiguous, and so are those for one expert. The `Routing` has everything that a dispatch and its combine need; each
micro-batch has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """The routing of one micro-batch in one layer. `chosen[t]` are the experts of token t.

    `order[i]`: the (token, choice) of the i-th row, sorted by expert. `counts[e]`: rows for expert e, of all ranks'
    experts. `arriving`: rows that come from each rank for each of this rank's experts, once that is known, and `rows`
    the same on the host. `send` and `receive`: rows to and from each. `trip`: what else an exchange has to remember.
    """

    chosen: Tensor
    order: Tensor
    counts: Tensor
    arriving: Tensor | None = None
    trip: Any = None
    send: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Routing:
        """Return the routing of tokens whose experts are chosen, before any rank knows of another's."""
        flat = chosen.reshape(-1)
        return cls(chosen, torch.argsort(flat, stable=True), _counted(flat, num_experts))

    @property
    def receive(self) -> list[int]:
        """Returns the number of rows from each rank."""
        return [sum(of_rank) for of_rank in self.rows]


class Router(nn.Module):
    """Scores by a linear, the best `top_k` by softmax; `balance` is the weight of its auxiliary loss.

    The loss is num_experts * sum over experts of (share of choices) * (mean probability), which is least when all
    experts get the same; the share has no gradient (Switch Transformer, eq. 4).
    """

    def __init__(self, width: int, num_experts: int, top_k: int, balance: float = 0.0) -> None:
        super().__init__()
        self.score = nn.Linear(width, num_experts, bias=False)
        self.num_experts, self.top_k, self.balance = num_experts, top_k, balance

    def forward(self, tokens: Tensor) -> tuple[Tensor, Routing, Tensor]:
        """Return (gates of the chosen experts, routing, balance loss) for tokens of shape [number, width]."""
        probabilities = self.score(tokens).softmax(-1)
        gates, chosen = probabilities.topk(self.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        routing = Routing.of(chosen, self.num_experts)
        share = routing.counts.to(probabilities.dtype) / max(1, chosen.numel())
        loss = self.balance * self.num_experts * (share * probabilities.mean(0)).sum()
        return gates, routing, loss


def _counted(numbers: Tensor, num: int) -> Tensor:
    """Return how often each of 0..num-1 is there. `torch.bincount` makes the host wait for a GPU, twice."""
    return numbers.new_zeros(num).scatter_add_(0, numbers, torch.ones_like(numbers))
