"""Routing: which experts each token goes to.

Rows, of which a token has one for each of its experts, are sorted by expert, so that what one rank sends another is a
run of them, and what an expert gets from one rank is a run of those. Everything a dispatch and its combine need to know
is in the `Routing`, made anew for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """Of one micro-batch in one layer. `chosen[t]` are the experts of token t.

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

    @property
    def receive(self) -> list[int]:
        """Rows from each rank."""
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
        """(gates of the chosen experts, the routing, the balance loss) of tokens of shape [number, width]."""
        probabilities = self.score(tokens).softmax(-1)
        gates, chosen = probabilities.topk(self.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts)
        share = counts.to(probabilities.dtype) / max(1, chosen.numel())
        loss = self.balance * self.num_experts * (share * probabilities.mean(0)).sum()
        return gates, Routing(chosen, order, counts), loss
