"""One MoE layer in segments: attention and routing, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from treadle.moe.exchanges import make_exchange
from treadle.moe.experts import Experts
from treadle.moe.router import Router, Routing
from treadle.runtime.model.segments import Segment, compute, exchange


class MoELayer(nn.Module):
    """`mixer` (attention, or whatever mixes tokens) and `ep`-th part of the experts, each with norm and residual.

    `x` is [..., width]. With `balance` the router's loss is added to the model's. `exchange` is how tokens travel
    (`treadle.moe.exchanges`): all_to_all, or deepep, which has no segments for counts. Checkpoints belong inside `attn`
    and `mlp`; around more than that they are refused.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        ep: int = 1,
        ep_rank: int = 0,
        balance: float = 0.0,
        mixer: nn.Module | None = None,
        exchange: str = "all_to_all",
    ) -> None:
        super().__init__()
        if num_experts % ep:
            raise ValueError(f"{num_experts} experts do not divide over {ep} ranks")
        own = num_experts // ep
        self.norm, self.mixer = nn.LayerNorm(width), mixer if mixer is not None else nn.Linear(width, width)
        self.expert_norm, self.router = nn.LayerNorm(width), Router(width, num_experts, top_k, balance)
        self.experts = Experts(width, hidden, own, first=ep_rank * own)
        self.exchange = make_exchange(exchange, num_experts)

    def segments(self) -> Sequence[Segment]:
        """Return the segments, which a pipeline runs op by op."""
        counted = [
            exchange("counts", self.exchange.count, reads="routing", writes="routing"),
            exchange("host", self.exchange.wait, reads="routing", writes="routing"),
        ]
        return [
            compute("attn", self.attn, reads="x", writes="h leaving gates routing aux_loss"),
            *(counted if self.exchange.counted else ()),
            exchange("dispatch", self.exchange.dispatch, reads="leaving gates routing", writes="rows gates routing"),
            compute("mlp", self.mlp, reads="rows routing", writes="made"),
            exchange("combine", self.combine, reads="made h gates routing", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Run the whole layer, in one process or called by all ranks at once; drops the router's loss."""
        return self.with_loss(x)[0]

    def with_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the whole layer; returns the output and the router's loss."""
        h, leaving, gates, routing, loss = self.attn(x)
        if self.exchange.counted:
            routing = self.exchange.wait(self.exchange.count(routing))
        rows, gates, routing = self.exchange.dispatch(leaving, gates, routing)
        return self.combine(self.mlp(rows, routing), h, gates, routing), loss

    def attn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Routing, Tensor]:
        """Mixes tokens, chooses their experts, and sorts their rows for the dispatch."""
        h = x + self.mixer(self.norm(x))
        flat = self.expert_norm(h).reshape(-1, h.shape[-1])
        gates, routing, loss = self.router(flat)
        return h, self.exchange.leaving(flat, routing), gates, routing, loss

    def mlp(self, rows: Tensor, routing: Routing) -> Tensor:
        """Run this rank's experts on the rows that came."""
        made: Tensor = self.experts(rows, routing.rows)
        return made

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Return the experts' outputs to their tokens and add the residual.

        The residual follows combine: it needs the sums.
        """
        return h + self.exchange.combine(made, gates, routing).reshape(h.shape)
