"""Sums the gradients of a rank's parameters over micro-batches, reduces them over replicas, and puts them into `.grad`.

Gradients of two-byte parameters are summed in float32. A reduction sums one flat tensor for each chunk and dtype, with
a flag for each parameter behind it: a parameter that no replica used keeps `.grad` None, as in a single process.

Tied parameters that the same ranks hold are reduced together, with no chunk, over those ranks. Several objects of one
on a rank are one summand, and all of them get the sum.

A step is all or nothing: `begin` leaves the gradients and sums of earlier steps alone and works on others, `keep` puts
the result into them, and `give_back` restores `.grad`, whatever a step that failed has done.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treadle.dist.groups import Group
from treadle.dist.streams import Download, keep, upload
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.tied import Tie

_LOW = (torch.bfloat16, torch.float16)


@dataclass
class _Flight:
    """A reduction on its way. The parameters of an entry, of one shape, have one gradient.

    Without a group this rank alone holds them, and `flat` is the sum already.
    """

    entries: list[tuple[nn.Parameter, ...]]
    flat: Tensor
    group: Group | None
    work: dist.Work | None = None
    used: Download | None = None
    """For each entry, whether some rank used it."""

    def launch(self) -> None:
        """Launches the reduction."""
        if self.group is not None:
            self.work = self.group.launch_reduce(self.flat)

    def arrive(self) -> None:
        """Waits for the reduction."""
        if self.group is not None:
            assert self.work is not None, "it is launched"
            self.group.wait(self.work)
        self.used = Download(self.flat[-len(self.entries) :])


@dataclass
class _Before:
    """The state before a step: `.grad` where there was one, the float32 sums that go on, whether `.grad` is reduced."""

    grads: dict[nn.Parameter, Tensor]
    sums: dict[Tensor, Tensor]
    reduced: bool


class _SumHook:
    """Adds each gradient of a parameter to its float32 sum. It does not keep the `Gradients` alive."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = weakref.ref(gradients)

    def __call__(self, param: Tensor) -> None:
        gradients = self.gradients()
        if gradients is not None:
            gradients._into_sum(param)


class Gradients:
    """The gradients of all chunks of a rank, in the order in which the chunks are reduced over `group`.

    Those of `RankOwned` modules are reduced over `expert_dp_group` instead, and those of ties with the number n over
    `tied_groups[n]`, where other ranks hold them too.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        order: Sequence[int],
        group: Group | None,
        expert_dp_group: Group | None = None,
        ep: int = 1,
        ties: Sequence[Tie] = (),
        tied_groups: Mapping[int, Group] | None = None,
    ) -> None:
        self.ties, self.tied_groups = tuple(ties), dict(tied_groups or {})
        self.group, self.expert_dp_group, self.order = group, expert_dp_group, list(order or chunks)
        self.owned: set[nn.Parameter] = set()
        for module in chunks.values() if ep > 1 else ():
            for part in module.modules():
                self.owned |= set(part.parameters()) if isinstance(part, RankOwned) else set()
        self._sums: dict[Tensor, Tensor] = {}
        self._held: dict[Tensor, Tensor] = {}
        self._before: _Before | None = None
        self._taking = threading.Lock()
        """Held while gradients are taken out of `.grad` for a reduction, which a lane's thread may do late."""
        self._flights: dict[int, list[_Flight]] = {}
        self._tied_flights: dict[int, list[_Flight]] = {}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.tied: set[nn.Parameter] = {p for tie in self.ties for p in tie.params if p.requires_grad}
        owner = {p: chunk for chunk in self.order for p in chunks[chunk].parameters() if p.requires_grad}
        self.params: dict[int, list[nn.Parameter]] = {chunk: [] for chunk in chunks}
        for param, chunk in owner.items():  # one that several chunks share is reduced with the last of them
            if param not in self.tied:
                self.params[chunk].append(param)
            if param.dtype in _LOW:
                self._listen(param)
        self._everything = list(owner)
        self.reduced = True

    @property
    def reduces(self) -> bool:
        """True if a step of this pipeline reduces gradients, on this rank or on another of it."""
        return self.group is not None or bool(self.ties)

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        _remove(self._hooks)

    def _listen(self, param: nn.Parameter) -> None:
        """Adds each gradient of a parameter to its float32 sum, behind all other hooks."""
        hook = param.register_post_accumulate_grad_hook(_SumHook(self))  # type: ignore[no-untyped-call]
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
        if reduce or not self.reduced or not self.reduces:
            return
        if any(p.grad is not None for p in self._everything):
            raise ValueError(
                "step(reduce=False) after a reduced step would mix reduced and local gradients in .grad; set the "
                "gradients to None first, or reduce only at the last of the steps that are accumulated"
            )

    def begin(self) -> None:
        """Begins a step.

        It adds to the gradients that earlier steps left in `.grad`, and does not reduce those again.
        """
        self._flights.clear()
        self._tied_flights.clear()
        for param, hook in list(self._hooks.items()):
            if next(reversed(param._post_accumulate_grad_hooks)) != hook.id:  # another was put on since
                hook.remove()
                self._listen(param)
        grads = {param: param.grad for param in self._everything if param.grad is not None}
        self._before = _Before(grads, self._sums, self.reduced)
        self._sums, self._held = {}, {}
        for param, grad in grads.items():
            is_low, is_reduced = param.dtype in _LOW, self.group is not None or param in self.tied
            if self.reduced and (is_reduced or is_low):
                self._held[param], param.grad = grad, None
            elif is_low:
                self._sums[param], param.grad = _continued(self._before.sums.get(param), grad), None
            else:
                param.grad = grad.clone()

    def gather(self, chunk: int) -> None:
        """Copies the gradients of a chunk into the flat tensor that is reduced."""
        self._flights[chunk] = []
        alike: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for param in self.params[chunk]:
            alike.setdefault((_summed_in(param), param in self.owned), []).append(param)
        for (_, owned), params in alike.items():
            group = self.expert_dp_group if owned else self.group
            if group is not None:
                self._flights[chunk].append(self._take([(param,) for param in params], group))

    def gather_tied(self, number: int) -> None:
        """Copies this rank's gradients of tied parameters into the tensors that are reduced."""
        alike: dict[torch.dtype, list[tuple[nn.Parameter, ...]]] = {}
        for tie in self.ties:
            params = tuple(param for param in tie.params if param in self.tied)
            if tie.number == number and params:
                alike.setdefault(_summed_in(params[0]), []).append(params)
        group = self.tied_groups.get(number)
        self._tied_flights[number] = [self._take(entries, group) for entries in alike.values()]

    def _take(self, entries: list[tuple[nn.Parameter, ...]], group: Group | None) -> _Flight:
        """Takes the gradients of parameters of one dtype out of sums and `.grad`."""
        with self._taking:
            assert self._before is not None, "a step that was given up takes nothing any more"
            return self._take_now(entries, group)

    def _take_now(self, entries: list[tuple[nn.Parameter, ...]], group: Group | None) -> _Flight:
        dtype, device = _summed_in(entries[0][0]), entries[0][0].device
        local = [[self._sums.get(p, p.grad) for p in params] for params in entries]
        grads = [[grad for grad in found if grad is not None] for found in local]
        for grad in (grad for found in grads for grad in found):
            _keep_parts(grad)  # this stream has yet to read what is let go of below
        parts = [
            _added(found) if found else torch.zeros(params[0].numel(), dtype=dtype, device=device)
            for params, found in zip(entries, grads, strict=True)
        ]
        flat = torch.cat([*parts, upload([bool(found) for found in grads], dtype, device)])
        for param in (param for params in entries for param in params):
            self._sums.pop(param, None)
            param.grad = None
        return _Flight(entries, flat, group)

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's gradients."""
        for flight in self._flights[chunk]:
            flight.launch()

    def reduce_tied(self, number: int) -> None:
        """Launches the reduction of tied parameters' gradients."""
        for flight in self._tied_flights[number]:
            flight.launch()

    def arrive(self, chunk: int) -> None:
        """Waits for the reduction of a chunk's gradients. The host reads at the end of the step which were used."""
        for flight in self._flights[chunk]:
            flight.arrive()

    def arrive_tied(self, number: int) -> None:
        """Waits for the reduction of tied parameters' gradients."""
        for flight in self._tied_flights[number]:
            flight.arrive()

    def finish(self, *, reduce: bool) -> None:
        """Puts reduced gradients, float32 sums, and gradients held back before, into `.grad`, in tensors of the step.

        The step can still be undone.
        """
        self.reduced = reduce or not self.reduces
        for flight in chain.from_iterable((*self._flights.values(), *self._tied_flights.values())):
            _land(flight)
        self._flights.clear()
        self._tied_flights.clear()
        for param, total in self._sums.items():
            before = self._held.pop(param, None)
            param.grad = (total if before is None else total + before).to(param.dtype)
        if self.reduced:
            self._sums = {}
        for param, before in self._held.items():
            param.grad = before if param.grad is None else _plus(param.grad, before)
        self._held = {}

    def keep(self) -> None:
        """Ends a step. A `.grad` that was there before is the same tensor, with the new values."""
        assert self._before is not None, "a step has begun"
        for param, before in self._before.grads.items():
            if param.grad is not None and param.grad is not before and param.grad.layout == before.layout:
                before.copy_(param.grad)
                param.grad = before
        self._before = None

    def give_back(self) -> None:
        """Undoes a step that failed: `.grad` is as it was before. Does nothing where no step has begun."""
        with self._taking:
            before, self._before = self._before, None
            if before is None:
                return
            for param in self._everything:
                param.grad = before.grads.get(param)
        self._sums, self.reduced = before.sums, before.reduced
        self._flights.clear()
        self._tied_flights.clear()

    def num_bad(self) -> int:
        """Returns how many parameters have a gradient that is not finite."""
        grads = [p.grad for p in self._everything if p.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        grads = [grad for grad in grads if grad.numel()]
        if not grads or grads[0].is_meta:
            return 0
        largest = torch.stack([n.double() for n in torch._foreach_norm(grads, float("inf"))])
        return int((~largest.isfinite()).sum())


def _remove(hooks: dict[nn.Parameter, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def refuse_summed(modules: Mapping[int, nn.Module]) -> None:
    """Refuses parameters whose gradients another Pipeline puts into its own sums: this one would never see them."""
    if _summed_by_another(modules) is not None:
        gc.collect()  # one that nobody has any more is none
    found = _summed_by_another(modules)
    if found is not None:
        raise ValueError(
            f"{found} belongs to another Pipeline, which sums its gradients and is not closed; "
            "close() that Pipeline before making one of the same modules"
        )


def _summed_by_another(modules: Mapping[int, nn.Module]) -> str | None:
    for chunk, module in modules.items():
        for name, param in module.named_parameters():
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                if isinstance(hook, _SumHook) and hook.gradients() is not None:
                    return f"chunk {chunk}: parameter {name}"
    return None


def _continued(total: Tensor | None, grad: Tensor) -> Tensor:
    """Returns a copy of the float32 sum that `.grad` was rounded from, or `.grad` itself if the user changed it since.

    Values are compared, as no version counts what is written to `.grad.data`; on the device, without a wait.
    """
    shown = grad.float()
    if total is None:
        return shown
    rounded = total.to(grad.dtype)
    same = (rounded.to_dense().view(torch.int16) == grad.to_dense().view(torch.int16)).all()
    if total.is_sparse or grad.is_sparse:
        return total.clone() if same else shown
    return torch.where(same, total, shown)


def _plus(new: Tensor, before: Tensor) -> Tensor:
    """Returns the sum, in `new` if that is dense."""
    return before + new if new.is_sparse else new.add_(before)


def _land(flight: _Flight) -> None:
    """Puts reduced gradients into `.grad`, for each object of a tied parameter a tensor of its own."""
    assert flight.used is not None, "its reduction has arrived"
    used = [True] * len(flight.entries) if flight.flat.is_meta else flight.used.tolist()
    at = 0
    for params, flag in zip(flight.entries, used, strict=True):
        size = params[0].numel()
        for param in params if flag else ():
            grad = flight.flat[at : at + size].view_as(param)
            param.grad = grad.to(param.dtype, copy=param is not params[0])
        at += size


def _summed_in(param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype in _LOW else param.dtype


def _added(grads: list[Tensor]) -> Tensor:
    """Returns the sum, flat and dense."""
    total, *others = [grad.to_dense().reshape(-1) for grad in grads]
    for grad in others:
        total = total + grad
    return total


def _keep_parts(grad: Tensor) -> None:
    """Keeps a gradient, or the parts of a sparse one, for the current stream."""
    for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
        keep(part)
