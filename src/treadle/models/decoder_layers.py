"""Decoder layers in segments: dense ones (attn, mlp), and those with experts (attn, dispatch, mlp, combine)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from treadle.models.attention import Attention
from treadle.models.mlp import GatedMLP
from treadle.models.model_config import ModelConfig
from treadle.models.routers import SigmoidRouter, SoftmaxRouter
from treadle.moe.exchanges import make_exchange
from treadle.moe.experts import Experts
from treadle.moe.router import Routing
from treadle.runtime.model.segments import Segment, compute, exchange, reference_forward


class DecoderLayer(nn.Module):
    """Attention after a norm, and what a subclass has after another. `number` is that of the layer in the model."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def segments(self) -> Sequence[Segment]:
        """Return the layer's segments."""
        raise NotImplementedError

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the whole layer, in one process or called by all ranks of its expert group at once.

        Losses of the layer's own are dropped.
        """
        out: Tensor = reference_forward(self, x, positions=positions, documents=documents)["x"]
        return out

    def mix(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Return x with what attention adds to it."""
        mixed: Tensor = self.self_attn(self.input_layernorm(x), positions, documents)
        return x + mixed


class DenseLayer(DecoderLayer):
    """A layer whose MLP every token passes."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__(config, number)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def segments(self) -> Sequence[Segment]:
        """Return the layer's segments."""
        return [
            compute("attn", self.mix, reads="x positions documents", writes="h"),
            compute("mlp", self.feed, reads="h", writes="x"),
        ]

    def feed(self, h: Tensor) -> Tensor:
        """Return h with what the MLP adds to it."""
        made: Tensor = self.mlp(self.post_attention_layernorm(h))
        return h + made


class SparseMLP(nn.Module):
    """The router, this rank's part of the experts, and the shared expert if there is one: Hugging Face's `mlp`."""

    def __init__(self, config: ModelConfig, ep: int, ep_rank: int) -> None:
        super().__init__()
        own = config.num_experts // ep
        self.gate = (SoftmaxRouter if config.scoring == "softmax" else SigmoidRouter)(config)
        self.experts = Experts(config.hidden_size, config.moe_intermediate_size, own, first=ep_rank * own)
        self.shared_experts = (
            GatedMLP(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )


class ExpertLayer(DecoderLayer):
    """A layer with routed experts, each on one of `ep` ranks, and perhaps a shared one on every rank."""

    def __init__(self, config: ModelConfig, number: int, *, ep: int = 1, ep_rank: int = 0) -> None:
        super().__init__(config, number)
        self.mlp = SparseMLP(config, ep, ep_rank)
        self.exchange = make_exchange("all_to_all", config.num_experts)

    def segments(self) -> Sequence[Segment]:
        """Return the layer's segments. The shared expert runs in mlp, so that the dispatch leaves before it."""
        shares = self.mlp.shared_experts is not None
        further = " flat" * shares + " aux_loss" * bool(self.mlp.gate.balance)
        return [
            compute("attn", self.route, reads="x positions documents", writes=f"h leaving gates routing{further}"),
            exchange("counts", self.exchange.count, reads="routing", writes="routing"),
            exchange("host", self.exchange.wait, reads="routing", writes="routing"),
            exchange("dispatch", self.exchange.dispatch, reads="leaving gates routing", writes="rows gates routing"),
            compute("mlp", self.feed_shared, reads="rows routing flat", writes="made shared")
            if shares
            else compute("mlp", self.feed, reads="rows routing", writes="made"),
            exchange("combine", self.combine, reads=f"made h gates routing{' shared' * shares}", writes="x"),
        ]

    def route(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> tuple[Tensor | Routing, ...]:
        """Mix tokens, choose their experts, and sort their rows for the dispatch."""
        h = self.mix(x, positions, documents)
        flat = self.post_attention_layernorm(h).flatten(0, -2)
        gates, routing, loss = self.mlp.gate(flat)
        made = (h, self.exchange.leaving(flat, routing), gates, routing)
        shared = () if self.mlp.shared_experts is None else (flat,)
        return (*made, *shared, *(() if loss is None else (loss,)))

    def feed(self, rows: Tensor, routing: Routing) -> Tensor:
        """Run this rank's experts on the rows that came."""
        made: Tensor = self.mlp.experts(rows, routing.rows)
        return made

    def feed_shared(self, rows: Tensor, routing: Routing, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Run this rank's experts on the rows that came, and the shared one on its own tokens."""
        assert self.mlp.shared_experts is not None
        return self.feed(rows, routing), self.mlp.shared_experts(flat)

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, routing: Routing, shared: Tensor | None = None) -> Tensor:
        """Return the experts' outputs to their tokens, and add them up."""
        added = self.exchange.combine(made, gates, routing)
        return h + (added if shared is None else added + shared).reshape(h.shape)
