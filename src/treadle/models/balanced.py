"""A layer's exchange on the meta device, where no router can choose: rows are divided evenly over all experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treadle.moe.exchanges.all_to_all import AllToAll
from treadle.moe.router import Routing


class BalancedExchange(AllToAll):
    """An all-to-all of `ep` ranks of which only this one is there: its own rows leave, and as many new ones arrive."""

    def __init__(self, num_experts: int, ep: int) -> None:
        super().__init__(num_experts)
        self.ep = ep

    def count(self, routing: Routing) -> Routing:
        """Leave it: every rank has the same numbers."""
        return routing

    def wait(self, routing: Routing) -> Routing:
        """Fill in the numbers of a balanced routing."""
        rows, rest = divmod(routing.chosen.numel(), self.num_experts)
        each = [rows + (expert < rest) for expert in range(self.num_experts)]
        own = self.num_experts // self.ep
        send = [sum(each[rank * own : (rank + 1) * own]) for rank in range(self.ep)]
        return replace(routing, send=send, rows=[each[:own] for _ in range(self.ep)])

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Return as many rows as arrive."""
        if self.ep == 1:
            return rows
        swapped: Tensor = _Moved.apply(rows, sum(receive))  # type: ignore[no-untyped-call]
        return swapped


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num: int) -> Tensor:
        ctx.num = len(rows)
        return rows.new_empty(num, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.num, *grad.shape[1:]), None
