"""The MoE layer in segments: attention and routing, dispatch, experts, combine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from treadle.moe.exchanges import ExchangeName, MakeExchange, TokenExchange, make_exchange
from treadle.moe.experts import Experts
from treadle.moe.router import Router, Routing
from treadle.runtime.model.segments import Segment, compute, exchange, reference_forward

Parts: TypeAlias = tuple[nn.Module, Router, Experts, nn.Module | None]


class RoutedLayer(nn.Module):
    """An MoE layer without its modules: a subclass has them, under names of its own.

    With a router that has a balance loss the segments write it. The shared expert runs in mlp, so that the dispatch
    leaves before it. Checkpoints belong inside `route` and `feed`; around more than that they are refused.
    """

    mix: Callable[..., Tensor]
    """Takes x and the side values; returns x with what attention adds to it."""

    side = ""
    """The names of the side values, apart by spaces."""

    exchange: TokenExchange

    @abstractmethod
    def parts(self) -> Parts:
        """Return the modules after attention: norm, router, this rank's experts, and the shared expert or None."""

    def segments(self) -> Sequence[Segment]:
        """Return the segments, which a pipeline runs op by op."""
        _, router, _, shared_experts = self.parts()
        flat, shared = (" flat", " shared") if shared_experts is not None else ("", "")
        loss = " aux_loss" if router.balance else ""
        return [
            compute("attn", self.route, reads=f"x {self.side}", writes=f"h leaving gates routing{flat}{loss}"),
            *self.exchange.counting,
            exchange("dispatch", self.exchange.dispatch, reads="leaving gates routing", writes="rows gates routing"),
            compute("mlp", self.feed, reads=f"rows routing{flat}", writes=f"made{shared}"),
            exchange("combine", self.combine, reads=f"made h gates routing{shared}", writes="x"),
        ]

    def route(self, x: Tensor, *side: Any) -> tuple[Any, ...]:
        """Mix tokens, choose their experts, and sort their rows for the dispatch."""
        norm, router, _, shared_experts = self.parts()
        h = self.mix(x, *side)
        flat = norm(h).reshape(-1, h.shape[-1])
        gates, routing, loss = router(flat)
        shared = () if shared_experts is None else (flat,)
        return (h, self.exchange.leaving(flat, routing), gates, routing, *shared, *(() if loss is None else (loss,)))

    def feed(self, rows: Tensor, routing: Routing, flat: Tensor | None = None) -> Any:
        """Run this rank's experts on the rows that came, and the shared one on the rank's own tokens."""
        _, _, experts, shared_experts = self.parts()
        made = experts(rows, routing.rows)
        return made if shared_experts is None else (made, shared_experts(flat))

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, routing: Routing, shared: Tensor | None = None) -> Tensor:
        """Return the experts' outputs to their tokens and add the residual, which needs the sums."""
        added = self.exchange.combine(made, gates, routing)
        return h + (added if shared is None else added + shared).reshape(h.shape)


class MoELayer(RoutedLayer):
    """`mixer` (attention, or whatever mixes tokens) and `ep`-th part of the experts, each with norm and residual.

    `x` is [..., width]. With `balance` the router's loss is added to the model's; `router` is another one than softmax
    over `top_k`. `shared_experts` take every token. `exchange` is how tokens travel (`treadle.moe.exchanges`):
    all_to_all, or deepep, which has no segments for counts.
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
        router: Router | None = None,
        shared_experts: nn.Module | None = None,
        exchange: ExchangeName | MakeExchange = "all_to_all",
    ) -> None:
        super().__init__()
        if num_experts % ep:
            raise ValueError(f"{num_experts} experts do not divide over {ep} ranks")
        own = num_experts // ep
        self.norm, self.mixer = nn.LayerNorm(width), mixer if mixer is not None else nn.Linear(width, width)
        self.expert_norm = nn.LayerNorm(width)
        self.router = router if router is not None else Router(width, num_experts, top_k, balance)
        self.experts, self.shared_experts = Experts(width, hidden, own, first=ep_rank * own), shared_experts
        self.exchange = make_exchange(exchange, num_experts)

    def parts(self) -> Parts:
        """Return the modules after the mixer."""
        return self.expert_norm, self.router, self.experts, self.shared_experts

    def mix(self, x: Tensor) -> Tensor:
        """Return x with what the mixer adds to it."""
        mixed: Tensor = self.mixer(self.norm(x))
        return x + mixed

    def forward(self, x: Tensor) -> Tensor:
        """Run the whole layer, in one process or called by all ranks at once; drops the router's loss."""
        return self.with_loss(x)[0]

    def with_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the whole layer; returns the output and the router's loss, 0 without `balance`."""
        values = reference_forward(self, x)
        return values["x"], values.get("aux_loss", x.new_zeros(()))
