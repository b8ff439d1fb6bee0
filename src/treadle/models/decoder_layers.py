"""Decoder layers in segments: dense ones (attn, mlp), and those with experts (attn, dispatch, mlp, combine)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from treadle.models.attention import Attention
from treadle.models.document_lengths import Documents
from treadle.models.mlp import GatedMLP
from treadle.models.model_config import ModelConfig
from treadle.moe.exchanges import ExchangeName, MakeExchange, make_exchange
from treadle.moe.experts import Experts
from treadle.moe.layer import Parts, RoutedLayer
from treadle.moe.router import Router
from treadle.runtime.model.segments import Segment, Segmented, compute, reference_forward


class DecoderLayer(nn.Module, Segmented):
    """Attention after a norm, and what a subclass has after another. `number` is that of the layer in the model."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, documents: Documents | None = None) -> Tensor:
        """Run the whole layer, in one process or called by all ranks of its expert group at once.

        Losses of the layer's own are dropped.
        """
        out: Tensor = reference_forward(self, x, positions=positions, documents=documents)["x"]
        return out

    def mix(self, x: Tensor, positions: Tensor, documents: Documents | None) -> Tensor:
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
        width, own = config.hidden_size, config.num_experts // ep
        self.gate = Router(
            width,
            config.num_experts,
            config.num_experts_per_tok,
            config.router_aux_loss_coef,
            scoring=config.scoring,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            n_group=config.n_group,
            topk_group=config.topk_group,
        )
        self.experts = Experts(width, config.moe_intermediate_size, own, first=ep_rank * own)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(width, shared) if shared else None


class ExpertLayer(RoutedLayer, DecoderLayer):
    """A layer with routed experts, each on one of `ep` ranks, and perhaps a shared one on every rank."""

    side = "positions documents"

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        *,
        ep: int = 1,
        ep_rank: int = 0,
        exchange: ExchangeName | MakeExchange = "all_to_all",
    ) -> None:
        super().__init__(config, number)
        self.mlp = SparseMLP(config, ep, ep_rank)
        self.exchange = make_exchange(exchange, config.num_experts)

    def parts(self) -> Parts:
        """Return the modules after attention, which have Hugging Face's names."""
        return self.post_attention_layernorm, self.mlp.gate, self.mlp.experts, self.mlp.shared_experts
