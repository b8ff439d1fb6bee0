"""One MoE layer in segments: attention and routing, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.moe.experts import Experts
from weft.moe.router import Router, Routing
from weft.runtime.exchange import Exchange
from weft.runtime.segments import Segment, compute, exchange


class MoELayer(nn.Module):
    """`mixer` (attention, or whatever mixes tokens) and `ep`-th part of the experts, each behind a norm and a residual.

    `x` is [..., width]. With `balance` the router's loss is added to the model's.
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
    ) -> None:
        super().__init__()
        if num_experts % ep:
            raise ValueError(f"{num_experts} experts do not divide over {ep} ranks")
        own = num_experts // ep
        self.norm, self.mixer = nn.LayerNorm(width), mixer if mixer is not None else nn.Linear(width, width)
        self.expert_norm, self.router = nn.LayerNorm(width), Router(width, num_experts, top_k, balance)
        self.experts = Experts(width, hidden, own, first=ep_rank * own)
        self.exchange = Exchange()

    def segments(self) -> Sequence[Segment]:
        """Its parts, for a pipeline to run when its Program says."""
        return [
            compute("attn", self.attn, reads="x", writes="h tokens gates routing aux_loss"),
            exchange("counts", self.count, reads="routing", writes="routing"),
            exchange("host", self.wait, reads="routing", writes="routing"),
            exchange("dispatch", self.dispatch, reads="tokens routing", writes="rows"),
            compute("mlp", self.mlp, reads="rows routing", writes="made"),
            exchange("combine", self.combine, reads="made h gates routing", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """All of it, in one process or where every rank calls it at once."""
        h, tokens, gates, routing, _ = self.attn(x)
        routing = self.wait(self.count(routing))
        return self.combine(self.mlp(self.dispatch(tokens, routing), routing), h, gates, routing)

    def attn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Routing, Tensor]:
        """Mixes tokens, chooses their experts, and puts rows in the order in which they travel."""
        h = x + self.mixer(self.norm(x))
        flat = self.expert_norm(h).reshape(-1, h.shape[-1])
        gates, routing, loss = self.router(flat)
        return h, flat[routing.order // self.router.top_k], gates, routing, loss

    def count(self, routing: Routing) -> Routing:
        """Tells every rank how many rows it will get."""
        return replace(routing, arriving=self.exchange.counts(routing.counts))

    def wait(self, routing: Routing) -> Routing:
        """Brings the numbers to the host, which a dispatch needs to make room."""
        assert routing.arriving is not None
        size = self.exchange.size
        send = routing.counts.reshape(size, -1).sum(1).tolist()
        return replace(routing, send=send, rows=routing.arriving.reshape(size, -1).tolist())

    def dispatch(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Rows to the ranks of their experts."""
        return self.exchange.swap(tokens, routing.send, routing.receive)

    def mlp(self, rows: Tensor, routing: Routing) -> Tensor:
        """Runs this rank's experts on the rows that came."""
        made: Tensor = self.experts(rows, routing.rows)
        return made

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Rows back to their tokens' ranks, and there into the tokens' sums."""
        back = self.exchange.swap(made, routing.receive, routing.send)
        weighted = back * gates.reshape(-1)[routing.order].unsqueeze(-1)
        flat = h.reshape(-1, h.shape[-1])
        token = (routing.order // self.router.top_k).unsqueeze(-1).expand_as(weighted)
        return (flat + torch.zeros_like(flat).scatter_add(0, token, weighted)).reshape(h.shape)
