"""What layers call on the meta device instead: an exchange of balanced rows, attention by another device's kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from treadle.models.attend import attend, attend_by, attention_kernel
from treadle.models.document_lengths import Documents
from treadle.moe.exchanges.all_to_all import AllToAll
from treadle.moe.router import Routing


class BalancedExchange(AllToAll):
    """An all-to-all of `ep` ranks of which only this one is there: its own rows leave, and as many new ones arrive.

    No router can choose on the meta device: rows are divided evenly over all experts.
    """

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


class AttentionOf(TorchFunctionMode):
    """Attention of meta tensors by the kernel of another device (`attention_kernel`).

    torch's own choice for meta tensors is the plain formula, which saves the matrix of all pairs of tokens several
    times. A CPU's flash kernel saves queries, keys, values, the output, a float32 number a row, and a mask in their
    type.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace attention and leave all else."""
        if func is attend:
            query, _, value, documents = args
            widths = query.shape[-1], value.shape[-1]
            with self:
                return attend_by(attention_kernel(self.device, query.dtype, widths, documents), *args)
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def packed(size: tuple[int, int]) -> Documents:
    """Return the documents of [sequences, tokens], two in each: what is saved does not depend on how many there are."""
    num, seq_len = size
    return Documents((((seq_len + 1) // 2, seq_len // 2),) * num)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # the kernel finds out by itself
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    made: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return made
