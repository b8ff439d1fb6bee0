"""Tokens by DeepEP (github.com/deepseek-ai/DeepEP), where it is installed.

Its normal kernels, within a node or across: a token goes once to each rank that has an expert of it, with its gates,
and comes back as one row, the sum of what that rank's experts made of it. A dispatch waits by itself, in the calling
thread, until it knows how many tokens come. The backward of a dispatch is a combine with the same handle, and the
reverse; the handle goes along with the micro-batch. Written against `deep_ep.Buffer` of release 1.2.1; never run on a
GPU here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from treadle.dist.groups import Group
from treadle.dist.streams import AwaitEvent
from treadle.moe.router import Routing
from treadle.runtime.model.exchange import EpGroupModule, ExchangeError, refuse_in_backward


@dataclass
class Trip:
    """Of one dispatch: DeepEP's handle; which of this rank's experts each token that came is for, -1 for none.

    `token`: of each row, the token that came of which it is a copy.
    """

    buffer: Any
    num_experts: int
    handle: Any = None
    experts: Tensor | None = None
    per_expert: tuple[int, ...] = ()
    token: Tensor | None = None


class DeepEP(EpGroupModule):
    """The exchange of one layer. All layers of a rank share a buffer."""

    counting = ()

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        _library()

    def join(self, ep_group: Group, shared: dict[Any, Any], await_event: AwaitEvent | None = None) -> None:
        """Take the group. Raises ValueError for a size of which DeepEP has no kernels."""
        try:
            _library().Buffer.get_dispatch_config(len(ep_group.ranks))
        except AssertionError as error:
            raise ValueError(
                f"DeepEP has no kernels for {len(ep_group.ranks)} ranks ({error}); choose another EP size, for example "
                "8, or use exchange='all_to_all'"
            ) from error
        super().join(ep_group, shared, await_event)

    def leave(self, *, clean: bool) -> None:
        """Destroy the buffers, which is a barrier of the group. One whose peer is lost is left to the process' end."""
        while clean and self.shared:
            self.shared.popitem()[1].destroy()
        super().leave(clean=clean)

    def leaving(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the tokens themselves."""
        return tokens

    def dispatch(self, leaving: Tensor, gates: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Routing]:
        """Tokens and their gates to the ranks of their experts, and there a row for each expert, sorted by expert."""
        refuse_in_backward("a dispatch by DeepEP")
        trip = Trip(self._buffer(leaving), self.num_experts)
        came, gates = _Dispatch.apply(leaving, gates, routing.chosen, trip)  # type: ignore[no-untyped-call]
        assert trip.experts is not None
        expert = trip.experts.reshape(-1)  # -1 for those of other ranks, which go after the rows that came
        order = torch.argsort(torch.where(expert >= 0, expert, self.num_experts), stable=True)
        taken = order[: sum(trip.per_expert)]  # the host knows how many: it need not wait for a count of them
        trip.token = taken // trip.experts.shape[-1]
        routing = replace(routing, rows=[list(trip.per_expert)], trip=trip)
        return came[trip.token], gates.reshape(-1)[taken], routing

    def combine(self, made: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Each token's weighted sum here, and then back to its rank, where the sums of all ranks are added up."""
        refuse_in_backward("a combine by DeepEP")
        trip: Trip = routing.trip
        assert trip.experts is not None
        assert trip.token is not None
        weighted = made * gates.unsqueeze(-1)
        summed = weighted.new_zeros(len(trip.experts), made.shape[-1]).index_add(0, trip.token, weighted)
        back: Tensor = _Combine.apply(summed.to(torch.bfloat16), trip)  # type: ignore[no-untyped-call]
        return back

    def _buffer(self, tokens: Tensor) -> Any:
        """Return the buffer for tokens of this width, made by all ranks of the group at their first dispatch of it."""
        if tokens.dtype is not torch.bfloat16:
            raise ValueError(
                f"DeepEP moves bfloat16, got {tokens.dtype}; have the layer compute in bfloat16, or use "
                "exchange='all_to_all'"
            )
        if self.ep_group is None:
            raise ValueError(
                "DeepEP needs an expert group: a mesh with ep, more than 1; in one process use 'all_to_all'"
            )
        size_bytes, buffer = tokens.shape[-1] * tokens.itemsize, _library().Buffer
        if size_bytes not in self.shared:
            size = self.size
            configs = [buffer.get_dispatch_config(size), buffer.get_combine_config(size)]
            nvl_bytes = max(config.get_nvl_buffer_size_hint(size_bytes, size) for config in configs)
            rdma_bytes = max(config.get_rdma_buffer_size_hint(size_bytes, size) for config in configs)
            comm = Comm(self.ep_group, tokens.device)
            self.shared[size_bytes] = buffer(None, nvl_bytes, rdma_bytes, explicitly_destroy=True, comm=comm)
        return self.shared[size_bytes]


class _Dispatch(torch.autograd.Function):
    """Gradients of tokens and gates come back by a combine."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gates: Tensor, chosen: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip, ctx.dtype, buffer = trip, gates.dtype, trip.buffer
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, trip.num_experts)
        with _waiting():
            came, trip.experts, gates, counts, trip.handle, _ = buffer.dispatch(
                tokens.contiguous(),
                topk_idx=chosen,
                topk_weights=gates.float(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=in_rank,
            )
        trip.per_expert = tuple(counts)
        return came, gates.to(ctx.dtype)  # as with all_to_all: in the precision of the router

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_gates: Tensor) -> tuple[Tensor | None, ...]:
        trip, weights = ctx.trip, grad_gates.float().contiguous()
        back, gates, _ = trip.buffer.combine(grad.contiguous(), trip.handle, topk_weights=weights)
        return back, gates.to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    """The gradient of a sum goes to all ranks that it came from, by a dispatch."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        back: Tensor = trip.buffer.combine(summed, trip.handle)[0]
        return back

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.buffer.dispatch(grad.contiguous(), handle=ctx.trip.handle)[0], None


class Comm:
    """As much of an mpi4py communicator as a Buffer uses to meet, over the expert group: without pickle."""

    def __init__(self, ep_group: Group, device: torch.device) -> None:
        self._ep_group, self._device = ep_group, device

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the place of this rank."""
        return self._ep_group.group_rank

    def Get_size(self) -> int:  # noqa: N802
        """How many there are."""
        return len(self._ep_group.ranks)

    def allgather(self, thing: Any) -> list[Any]:
        """Everyone's: what can be written as a literal, or a bytearray."""
        is_bytearray = isinstance(thing, bytearray)
        text = repr((is_bytearray, bytes(thing) if is_bytearray else thing)).encode()
        sizes = [int(size) for size in self._gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        told = [row[:size].numpy().tobytes().decode() for row, size in zip(self._gather(padded), sizes, strict=True)]
        return [bytearray(value) if was_bytearray else value for was_bytearray, value in map(ast.literal_eval, told)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        try:
            return [row.cpu() for row in self._ep_group.all_gather(mine.to(self._device))]
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error


@contextmanager
def _waiting() -> Iterator[None]:
    """Raise ExchangeError where DeepEP gives up its wait for the counts of other ranks."""
    try:
        yield
    except RuntimeError as error:
        if "timeout" not in str(error):
            raise
        raise ExchangeError(str(error)) from error


def _library() -> ModuleType:
    try:
        return import_module("deep_ep")
    except ImportError as error:
        raise ValueError(
            f"exchange='deepep' needs the package deep_ep (github.com/deepseek-ai/DeepEP), which cannot be imported "
            f"({error}); install it, or use exchange='all_to_all'"
        ) from error
