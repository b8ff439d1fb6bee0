"""Sums the gradients of a rank's parameters over micro-batches, reduces them over replicas, and puts them into `.grad`.

Gradients of two-byte parameters are summed in float32. A reduction sums one flat tensor for each chunk and dtype, with
a flag for each parameter behind it: a parameter that no replica used keeps `.grad` None, as in a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treadle.dist.groups import Group
from treadle.dist.streams import Download, keep, upload
from treadle.runtime.model.exchange import RankOwned

_LOW = (torch.bfloat16, torch.float16)


@dataclass
class _Flight:
    """A reduction on its way."""

    params: list[nn.Parameter]
    flat: Tensor
    group: Group
    work: dist.Work | None = None
    used: Download | None = None
    """For each parameter, whether some replica used it."""


class Gradients:
    """The gradients of all chunks of a rank, in the order in which the chunks are reduced over `group`.

    Those of `RankOwned` modules are reduced over `expert_dp_group` instead.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        order: Sequence[int],
        group: Group | None,
        expert_dp_group: Group | None = None,
        ep: int = 1,
    ) -> None:
        self.group, self.expert_dp_group, self.order = group, expert_dp_group, list(order or chunks)
        self.owned: set[nn.Parameter] = set()
        for module in chunks.values() if ep > 1 else ():
            for part in module.modules():
                self.owned |= set(part.parameters()) if isinstance(part, RankOwned) else set()
        self._sums: dict[Tensor, Tensor] = {}
        self._held: dict[Tensor, Tensor] = {}
        self._rounded: dict[Tensor, tuple[Tensor, int]] = {}  # what `.grad` showed of a sum that goes on
        self._flights: dict[int, list[_Flight]] = {}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        owner = {p: chunk for chunk in self.order for p in chunks[chunk].parameters() if p.requires_grad}
        self.params: dict[int, list[nn.Parameter]] = {chunk: [] for chunk in chunks}
        for param, chunk in owner.items():  # one that several chunks share is reduced with the last of them
            self.params[chunk].append(param)
            if param.dtype in _LOW:
                self._listen(param)
        self.reduced = True

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _listen(self, param: nn.Parameter) -> None:
        """Adds each gradient of a parameter to its float32 sum, behind all other hooks."""
        hook = param.register_post_accumulate_grad_hook(self._into_sum)  # type: ignore[no-untyped-call]
        self._hooks[param] = hook

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Adds a weight gradient that ran apart from its input gradient."""
        if param.dtype in _LOW:
            self._add_to_sum(param, grad)
        elif param.grad is None:
            param.grad = grad.to(param.dtype)
        else:
            param.grad.add_(grad)

    def _into_sum(self, param: Tensor) -> None:
        if param.grad is not None:  # torch comes by even where an input half has left the gradient for later
            self._add_to_sum(param, param.grad)
            param.grad = None

    def _add_to_sum(self, param: Tensor, grad: Tensor) -> None:
        total = self._sums.get(param)
        if total is None:
            self._sums[param] = grad.to(torch.float32, copy=True)
        else:
            total.add_(grad)

    def refuse_mixture(self, *, reduce: bool) -> None:
        """Refuses a local step on top of reduced gradients. All ranks call it alike, so none is lost by it."""
        if reduce or not self.reduced or self.group is None:
            return
        if any(p.grad is not None for params in self.params.values() for p in params):
            raise ValueError(
                "step(reduce=False) after a reduced step would mix reduced and local gradients in .grad; set the "
                "gradients to None first, or reduce only at the last of the steps that are accumulated"
            )

    def begin(self) -> None:
        """Begins a step.

        It adds to the gradients that earlier steps left in `.grad`, and does not reduce those again.
        """
        self._flights.clear()  # a step that failed may have left some
        everything = [p for params in self.params.values() for p in params]
        for param, hook in list(self._hooks.items()):
            if next(reversed(param._post_accumulate_grad_hooks)) != hook.id:  # another was put on since
                hook.remove()
                self._listen(param)
        aside = self.reduced and self.group is not None
        for param in everything:
            if param.grad is None:
                self._sums.pop(param, None)  # the user threw the gradient away
            elif aside or (self.reduced and param.dtype in _LOW):
                self._held[param], param.grad = param.grad, None
            elif param.dtype in _LOW:
                self._resume(param, param.grad)
        self._rounded.clear()

    def _resume(self, param: nn.Parameter, grad: Tensor) -> None:
        """Continues the float32 sum that `.grad` was rounded from, unless the user changed `.grad` since."""
        shown, version = self._rounded.get(param, (None, -1))
        if shown is not grad or version != grad._version:
            self._sums[param] = grad.float()
        param.grad = None

    def gather(self, chunk: int) -> None:
        """Copies the gradients of a chunk into the flat tensor that is reduced."""
        self._flights[chunk] = []
        alike: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for param in self.params[chunk]:
            dtype = torch.float32 if param.dtype in _LOW else param.dtype
            alike.setdefault((dtype, param in self.owned), []).append(param)
        for (dtype, owned), params in alike.items():
            group = self.expert_dp_group if owned else self.group
            if group is None:
                continue
            local = [self._sums.get(p, p.grad) for p in params]
            for grad in local:
                _keep_parts(grad)  # this stream has yet to read what is let go of below
            used = upload([g is not None for g in local], dtype, params[0].device)
            parts = [
                g.to_dense().reshape(-1) if g is not None else torch.zeros(p.numel(), dtype=dtype, device=p.device)
                for p, g in zip(params, local, strict=True)
            ]
            flat = torch.cat([*parts, used])
            for param in params:
                self._sums.pop(param, None)
                param.grad = None
            self._flights[chunk].append(_Flight(params, flat, group))

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's gradients."""
        for flight in self._flights[chunk]:
            flight.work = flight.group.launch_reduce(flight.flat)

    def arrive(self, chunk: int) -> None:
        """Waits for the reduction of a chunk's gradients. The host reads at the end of the step which were used."""
        for flight in self._flights[chunk]:
            assert flight.work is not None
            flight.group.wait(flight.work)
            flight.used = Download(flight.flat[-len(flight.params) :])

    def finish(self, *, reduce: bool) -> None:
        """Ends a step: puts reduced gradients, float32 sums, and gradients held back before, into `.grad`."""
        self.reduced = reduce or self.group is None
        for flights in self._flights.values():
            for flight in flights:
                _land(flight)
        self._flights.clear()
        for param, total in self._sums.items():
            before = self._held.pop(param, None)
            param.grad = (total if before is None else total + before).to(param.dtype)
            self._rounded[param] = (param.grad, param.grad._version)
        if self.reduced:
            self._sums.clear()
            self._rounded.clear()
        for param, before in self._held.items():
            param.grad = before if param.grad is None else before.add_(param.grad)
        self._held.clear()

    def num_bad(self) -> int:
        """Returns how many parameters have a gradient that is not finite."""
        grads = [p.grad for params in self.params.values() for p in params if p.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        grads = [grad for grad in grads if grad.numel()]
        if not grads or grads[0].is_meta:
            return 0
        largest = torch.stack([n.double() for n in torch._foreach_norm(grads, float("inf"))])
        return int((~largest.isfinite()).sum())


def _land(flight: _Flight) -> None:
    """Puts reduced gradients into `.grad`."""
    assert flight.used is not None, "its reduction has arrived"
    used = [True] * len(flight.params) if flight.flat.is_meta else flight.used.tolist()
    at = 0
    for param, flag in zip(flight.params, used, strict=True):
        size = param.numel()
        if flag:
            param.grad = flight.flat[at : at + size].view_as(param).to(param.dtype)
        at += size


def _keep_parts(grad: Tensor | None) -> None:
    """Keeps a gradient, or the parts of a sparse one, for the current stream."""
    if grad is not None:
        for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
            keep(part)
