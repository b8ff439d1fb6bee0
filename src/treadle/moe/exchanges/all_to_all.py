"""Rows by an uneven all-to-all. Gates stay where their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treadle.dist.streams import Download
from treadle.moe.permutation import copied, permuted
from treadle.moe.router import Routing
from treadle.runtime.model.exchange import Exchange
from treadle.runtime.model.segments import Segment, exchange
from treadle.runtime.model.weight_grad import as_it_is


class AllToAll(Exchange):
    """A row travels for each of a token's experts, once all know how many."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def leaving(self, tokens: Tensor, routing: Routing) -> Tensor:
        """A row for each (token, choice), in the order in which they travel."""
        return copied(tokens, routing.token, routing.order, routing.place)

    @property
    def counting(self) -> Sequence[Segment]:
        """The segments in which ranks learn how many rows each gets."""
        counts = exchange("counts", self.count, reads="routing", writes="routing")
        return counts, exchange("host", self.wait, reads="routing", writes="routing")

    def count(self, routing: Routing) -> Routing:
        """Tells every rank how many rows it will get, and starts the copy of the numbers to the host."""
        arriving = self.counts(routing.counts)
        leaving = routing.counts.reshape(self.size, -1).sum(1)
        return replace(routing, arriving=arriving, trip=Download(torch.cat([leaving, arriving])))

    def wait(self, routing: Routing) -> Routing:
        """Wait on the host for the numbers, which a dispatch needs to make room."""
        numbers = routing.trip.tensor(self.await_event)
        send, rows = numbers[: self.size].tolist(), numbers[self.size :].reshape(self.size, -1).tolist()
        return replace(routing, trip=None, send=send, rows=rows)

    def dispatch(self, leaving: Tensor, gates: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Routing]:
        """Rows to the ranks of their experts."""
        return self.swap(leaving, routing.send, routing.receive), gates, routing

    def combine(self, made: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Send rows back to their tokens' ranks, and add them up there: in float32 for two-byte types, rounded once."""
        back = self.swap(made, routing.receive, routing.send)
        wide = torch.promote_types(back.dtype, gates.dtype)
        each = permuted(back, routing.place, routing.order).view(*gates.shape, back.shape[-1])
        with as_it_is(back):
            return torch.bmm(gates.unsqueeze(1).to(wide), each.to(wide)).squeeze(1)
