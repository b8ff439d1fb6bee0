"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.models.model_config import ModelConfig
from treadle.moe.router import Routing


class ExpertRouter(nn.Module):
    """Scores each expert for each token by a linear; a subclass chooses by the scores.

    `balance` is the weight of the balance loss: num_experts * sum over experts of (share of choices) * (mean share of
    the score), least when all experts get the same; the share of choices has no gradient (Switch Transformer, eq. 4).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.score = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.balance = config.router_aux_loss_coef

    def forward(self, tokens: Tensor) -> tuple[Tensor, Routing, Tensor | None]:
        """Choose the experts of tokens [number, hidden].

        Returns:
            The gates [number, top_k] of the chosen experts, the routing, and the balance loss; None without one.

        """
        shares, gates, chosen = self.choose(tokens)
        routing = Routing.of(chosen, self.score.out_features)
        self.count(routing.counts)
        loss = self._balance_loss(shares, routing) if self.balance else None
        return gates.to(tokens.dtype), routing, loss

    @abstractmethod
    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (each expert's share of a token's score, gates, chosen experts); shares and gates in float32."""

    def count(self, counts: Tensor) -> None:
        """Take note of how many tokens each expert got."""

    def _balance_loss(self, shares: Tensor, routing: Routing) -> Tensor:
        chosen = routing.counts.to(shares.dtype) / max(1, routing.chosen.numel())
        return self.balance * len(routing.counts) * (chosen * shares.mean(0)).sum()


class SoftmaxRouter(ExpertRouter):
    """The best by softmax over all experts; with `norm_topk_prob` a token's gates add up to 1 (Qwen3-MoE)."""

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (shares, gates, chosen experts)."""
        shares = self.score(tokens).softmax(-1, dtype=torch.float32)
        gates, chosen = shares.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return shares, gates, chosen


class SigmoidRouter(ExpertRouter):
    """The best by sigmoid plus a bias that only choices see; gates come from the sigmoid alone (DeepSeek-V3).

    `e_score_correction_bias` moves after each step against the load, which `tokens_per_expert` counts (`update_bias`).
    Scores are computed in float32 whatever the model's type, as DeepSeek-V3 does.
    """

    e_score_correction_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.scale, self.n_group, self.topk_group = config.routed_scaling_factor, config.n_group, config.topk_group
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(config.num_experts), persistent=False)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (shares, gates, chosen experts)."""
        scores = functional.linear(tokens.float(), self.score.weight.float()).sigmoid()
        chosen = self._allowed(scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        gates = scores.gather(1, chosen)
        if self.norm_topk_prob:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20), gates * self.scale, chosen

    def _allowed(self, scores: Tensor) -> Tensor:
        """Return the scores with -inf outside a token's best groups. A group is as good as its two best experts."""
        if self.n_group == 1:
            return scores
        grouped = scores.reshape(len(scores), self.n_group, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(barred.unsqueeze(-1), float("-inf")).flatten(1)

    def count(self, counts: Tensor) -> None:
        """Add to the tokens of each expert since the last update, where the forward is part of a training step."""
        if torch.is_grad_enabled():
            self.tokens_per_expert += counts
