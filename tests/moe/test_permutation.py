"""Rows that move by an index: the right ones, in float32 sums, the same bits twice, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treadle.models.on_meta import BalancedExchange
from treadle.moe import MoELayer, Routing
from treadle.moe.exchanges import AllToAll
from treadle.moe.permutation import transposition

SIZES = ([[3, 1, 0, 5]], [[2], [0], [4]], [[3, 0, 2, 1], [0, 0, 4, 7], [1, 0, 0, 2]], [[0, 0], [0, 0]])


def transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Piece by piece."""
    pieces = torch.split(rows, [size for of_one in sizes for size in of_one])
    return torch.cat([piece for j in range(len(sizes[0])) for piece in pieces[j :: len(sizes[0])]])


@pytest.mark.parametrize("sizes", SIZES)
def test_a_transposition_is_its_index(sizes: list[list[int]]) -> None:
    rows = torch.arange(sum(map(sum, sizes)))
    index = transposition(sizes, torch.device("cpu"))
    assert torch.equal(rows[index], transposed(rows, sizes))
    back = transposition(list(zip(*sizes, strict=True)), torch.device("cpu"))
    assert torch.equal(index[back], rows)


def exchanged(dtype: torch.dtype, tokens: Tensor, gates: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A dispatch and its combine in one process; the sums, and the gradients of tokens and gates."""
    exchange = AllToAll(int(chosen.max()) + 1)
    tokens, gates = (value.detach().to(dtype).requires_grad_() for value in (tokens, gates))
    routing = Routing.of(chosen, exchange.num_experts)
    made = exchange.combine(exchange.leaving(tokens, routing), gates, routing)
    torch.autograd.backward(made, torch.cos(torch.arange(made.numel())).view_as(made).to(dtype))
    assert tokens.grad is not None
    assert gates.grad is not None
    return made.detach(), tokens.grad, gates.grad


def drawn(num: int, top_k: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randn(num, width, generator=draw).bfloat16()
    gates = torch.rand(num, top_k, generator=draw).bfloat16()
    chosen = torch.stack([torch.randperm(16, generator=draw)[:top_k] for _ in range(num)])
    return tokens, gates, chosen


def test_bfloat16_sums_are_rounded_once() -> None:
    """Gradients of rows travel in bfloat16, so those of tokens are rounded twice."""
    values = drawn(200, 8, 64)
    wanted = exchanged(torch.float64, *values)
    for got, want, most in zip(exchanged(torch.bfloat16, *values), wanted, (1.01, 2, 2), strict=True):
        once = want.bfloat16().double()
        error, least = ((each.double() - want).abs().max() for each in (got, once))
        assert error <= most * least


def test_sums_are_the_same_bits_and_by_no_atomics() -> None:
    values = drawn(64, 4, 32)
    with _NoAtomics():
        first, again = (exchanged(torch.float32, *values) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


class _NoAtomics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses the kernels that add by atomics on a GPU, which `torch.use_deterministic_algorithms` names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sum = any(part in str(func) for part in ("scatter_add", "index_add", "index_put", "scatter_reduce"))
        assert not (is_sum and args[0].is_floating_point()), func
        return func(*args, **(kwargs or {}))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors that calls return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.num += sum(isinstance(leaf, Tensor) for leaf in tree_leaves(made))
        return made


def test_a_layer_makes_as_many_tensors_for_many_experts_as_for_few() -> None:
    assert tensors_made(8, 16) == tensors_made(2, 2)


def tensors_made(ranks: int, experts_each: int) -> int:
    num = ranks * experts_each
    with torch.device("meta"):
        layer = MoELayer(64, 32, num, top_k=2, ep=ranks, exchange=partial(BalancedExchange, ep=ranks))
        x = torch.empty(512, 64, requires_grad=True)
    with _Made() as made:
        out = layer(x)
        torch.autograd.backward(out, torch.empty_like(out))
    return int(made.num)
