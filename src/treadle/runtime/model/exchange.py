"""The exchange of rows between the ranks of an expert group, as autograd sees it.

An `Exchange` belongs to a layer and has no state of a micro-batch: the record of a dispatch goes from segment to
segment as a value. Without a group, or in a group of one, rows stay where they are.

A checkpoint must not span an exchange: its recomputation in backward would send rows again, at a moment when other
ranks run other ops. A checkpoint inside a compute segment is free to recompute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.dist.errors import OWN_ERRORS
from treadle.dist.groups import Group
from treadle.dist.streams import AwaitEvent
from treadle.host.errors import TreadleError

_NOT_IN_BACKWARD = -1


class ExchangeError(TreadleError, RuntimeError):
    """A wait for other ranks of the expert group failed. It has the words of the wait's own error."""


class RankOwned(nn.Module):
    """A module whose parameters no other rank of its expert group has.

    Only ranks with the same experts sum their gradients.
    """


class EpGroupModule(nn.Module):
    """A module that communicates over an expert group. A Pipeline gives it the group before its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_group: Group | None = None
        self.await_event: AwaitEvent | None = None
        """How a device's numbers from other ranks are waited for: until one of them is lost, or late."""
        self.shared: dict[Any, Any] = {}

    def join(self, ep_group: Group, shared: dict[Any, Any], await_event: AwaitEvent | None = None) -> None:
        """Takes the group, a dict that all modules of the group share, and how to wait for a device."""
        self.ep_group, self.shared, self.await_event = ep_group, shared, await_event

    def leave(self, *, clean: bool) -> None:
        """Gives the group back when its Pipeline is closed: `clean` where no rank of it is lost."""
        self.ep_group, self.shared, self.await_event = None, {}, None

    @property
    def size(self) -> int:
        """Returns the number of ranks of the group."""
        return len(self.ep_group.ranks) if self.ep_group is not None else 1


class _Swap(torch.autograd.Function):
    """Sends rows to their ranks; its backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ep_group: Group, send: list[int], receive: list[int]) -> Tensor:
        ctx.ep_group, ctx.send, ctx.receive = ep_group, send, receive
        return _swap(ep_group, rows, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(ctx.ep_group, grad, ctx.receive, ctx.send), None, None, None


class Exchange(EpGroupModule):
    """Moves rows between the ranks of an expert group."""

    def counts(self, counts: Tensor) -> Tensor:
        """Takes row counts for each expert of all ranks; returns those from each rank for each own expert."""
        if self.ep_group is None:
            return counts
        refuse_in_backward("an exchange of counts")
        each = [counts.numel() // self.size] * self.size
        return _swap(self.ep_group, counts.reshape(-1), each, each)

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends `send[r]` rows to each rank r and receives `receive[r]`; gradients go the way back."""
        if self.ep_group is None:
            return rows
        refuse_in_backward("an exchange of rows")
        swapped: Tensor = _Swap.apply(rows, self.ep_group, send, receive)  # type: ignore[no-untyped-call]
        return swapped


def refuse_in_backward(what: str) -> None:
    """Refuses the forward of an exchange during a backward: a checkpoint is recomputing it."""
    if torch._C._current_graph_task_id() != _NOT_IN_BACKWARD:
        raise ValueError(
            f"{what} is recomputed in backward: a checkpoint spans it, and what ranks have exchanged they must not "
            "exchange again; checkpoint only inside what computes, attn and mlp each on their own"
        )


def _swap(ep_group: Group, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    if sum(send) != len(rows):  # gloo would take it for a broken connection
        raise ValueError(f"{len(rows)} rows are to be exchanged, but the splits are {send}, {sum(send)} in all")
    try:
        return ep_group.swap(rows, send, receive)
    except RuntimeError as error:
        if isinstance(error, OWN_ERRORS):
            raise
        raise ExchangeError(str(error)) from error
