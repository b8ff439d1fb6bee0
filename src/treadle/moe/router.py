"""Routing: which experts each token goes to, and how much each of them counts.

A token has one row for each of its experts. Rows are sorted by expert, so the rows from one rank to another are
contiguous, and so are those for one expert. The `Routing` has everything that a dispatch and its combine need; each
micro-batch has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.moe.permutation import inverse_of

Scoring: TypeAlias = Literal["softmax", "sigmoid"]

_NO_ZERO = 1e-20


@dataclass(frozen=True)
class Routing:
    """The routing of one micro-batch in one layer. `chosen[t]` are the experts of token t.

    `order[i]`: the (token, choice) of the i-th row, sorted by expert; `place`: the row of each (token, choice).
    `counts[e]`: rows for expert e, of all ranks' experts. `arriving`: rows that come from each rank for each of this
    rank's experts, once that is known, and `rows` the same on the host. `send` and `receive`: rows to and from each.
    `trip`: what else an exchange has to remember.
    """

    chosen: Tensor
    order: Tensor
    place: Tensor
    counts: Tensor
    arriving: Tensor | None = None
    trip: Any = None
    send: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Routing:
        """Return the routing of tokens whose experts are chosen, before any rank knows of another's."""
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        return cls(chosen, order, inverse_of(order), _counted(flat, num_experts))

    @property
    def token(self) -> Tensor:
        """Returns the token of each row."""
        return self.order // self.chosen.shape[-1]

    @property
    def receive(self) -> list[int]:
        """Returns the number of rows from each rank."""
        return [sum(of_rank) for of_rank in self.rows]


class Router(nn.Module):
    """Scores each expert for each token by a linear, and chooses the best `top_k`; options have Hugging Face's names.

    Softmax is Qwen3-MoE's router. Sigmoid is DeepSeek-V3's, with a bias that only choices see: after each step
    `treadle.models.update_bias` moves `e_score_correction_bias` against the load, which `tokens_per_expert` counts.
    A token's experts are in its best `topk_group` of `n_group` groups; a group is as good as its two best experts.
    With `norm_topk_prob` a token's gates add up to 1. Scores are float32 or wider; with sigmoid so is the linear.

    `balance` is the weight of the balance loss: num_experts * sum over experts of (share of choices) * (mean share of
    the score), least when all experts get the same; the share of choices has no gradient (Switch Transformer, eq. 4).
    """

    e_score_correction_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        balance: float = 0.0,
        *,
        scoring: Scoring = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
    ) -> None:
        super().__init__()
        if scoring not in get_args(Scoring):
            raise ValueError(f"scoring is {' or '.join(get_args(Scoring))}, got {scoring!r}")
        self.score = nn.Linear(width, num_experts, bias=False)
        self.num_experts, self.top_k, self.balance, self.scoring = num_experts, top_k, balance, scoring
        self.norm_topk_prob, self.scale = norm_topk_prob, routed_scaling_factor
        self.n_group, self.topk_group = n_group, topk_group
        if scoring == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
            self.register_buffer("tokens_per_expert", torch.zeros(num_experts), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Routing, Tensor | None]:
        """Choose the experts of tokens [number, width].

        Returns:
            The gates [number, top_k] of the chosen experts, the routing, and the balance loss; None without `balance`.

        """
        scores = self._scores(tokens)
        chosen = self._allowed(scores.detach()).topk(self.top_k, dim=-1).indices
        gates = scores.gather(1, chosen)
        if self.norm_topk_prob:
            gates = gates / (gates.sum(-1, keepdim=True) + _NO_ZERO)
        routing = Routing.of(chosen, self.num_experts)
        if self.scoring == "sigmoid" and torch.is_grad_enabled():  # part of a training step
            self.tokens_per_expert += routing.counts
        loss = self._balance_loss(scores, routing) if self.balance else None
        return (gates * self.scale).to(tokens.dtype), routing, loss

    def _scores(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        if self.scoring == "softmax":
            return self.score(tokens).softmax(-1, dtype=wide)  # type: ignore[no-any-return]
        return functional.linear(tokens.to(wide), self.score.weight.to(wide)).sigmoid()

    def _allowed(self, scores: Tensor) -> Tensor:
        """Return the scores that choices are made by: with the bias, and -inf outside a token's best groups."""
        if self.scoring == "sigmoid":
            scores = scores + self.e_score_correction_bias
        if self.n_group == 1:
            return scores
        grouped = scores.reshape(len(scores), self.n_group, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(barred.unsqueeze(-1), float("-inf")).flatten(1)

    def _balance_loss(self, scores: Tensor, routing: Routing) -> Tensor:
        shares = scores if self.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + _NO_ZERO)
        chosen = routing.counts.to(shares.dtype) / max(1, routing.chosen.numel())
        return self.balance * self.num_experts * (chosen * shares.mean(0)).sum()


def _counted(numbers: Tensor, num: int) -> Tensor:
    """Return how often each of 0..num-1 is there. `torch.bincount` makes the host wait for a GPU, twice."""
    return numbers.new_zeros(num).scatter_add_(0, numbers, torch.ones_like(numbers))
