"""Runs a linear's weight gradient apart: its input gradient in I, its weight gradient when the schedule has W.

During I each `nn.Linear` of the chunk computes only the gradient of its input, and queues its input and the gradient of
its output. W multiplies the two. No graph is kept or walked for W, and nothing else that autograd saved stays alive in
between. A module of another kind does the same if it is a `DefersWeightGrad`. All other parameters (norms, embeddings,
parameters of custom modules) get their gradients in I, so gradients never depend on how many could be deferred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.runtime.model.gradient_bucket import OuterProduct

_unsafe_view = torch.ops.aten._unsafe_view.default

AddGradient = Callable[[Tensor, "Tensor | OuterProduct"], None]
"""Adds to a parameter a gradient of it."""

WeightHalf = Callable[[Tensor, Tensor, AddGradient], None]
"""Computes gradients of parameters from the input of a module and the gradient of its output."""


class WeightGrad(NamedTuple):
    """A deferred weight gradient of one module: its input, its output gradient, and what multiplies them."""

    x: Tensor
    grad: Tensor
    half: WeightHalf
    module: nn.Module
    versions: tuple[int, int]
    """How often both had been written to when the gradient was deferred."""

    @property
    def is_void(self) -> bool:
        """Returns whether input or gradient was written to since."""
        return (self.x._version, self.grad._version) != self.versions

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that it keeps alive."""
        return self.x.nbytes + self.grad.nbytes

    def run(self, add: AddGradient) -> None:
        """Computes the gradients of the module's parameters."""
        self.half(self.x, self.grad, add)


class WeightGradQueue:
    """The deferred weight gradients of one chunk.

    While the queue is closed, weight gradients run with the rest of the backward.
    """

    def __init__(self) -> None:
        self._open: list[WeightGrad] | None = None

    def open(self) -> None:
        """Opens the queue: weight gradients are deferred from here on."""
        self._open = []

    def close(self) -> list[WeightGrad]:
        """Closes the queue and returns the weight gradients deferred since `open`."""
        halves, self._open = self._open, None
        assert halves is not None, "closed without being opened"
        return halves

    def take(self, x: Tensor, grad: Tensor, half: WeightHalf, module: nn.Module) -> bool:
        """Defers a weight gradient of a module if the queue is open; returns whether it did."""
        if self._open is None:
            return False
        versions = x._version, grad._version
        self._open.append(WeightGrad(x.detach(), grad, half, module, versions))  # the graph of x would stay alive
        return True


class DefersWeightGrad(nn.Module):
    """A module that can defer the gradients of all its own parameters: its backward offers them to `defer`."""

    _queue: WeightGradQueue | None = None
    _num_hooks = 0
    _own: tuple[nn.Parameter | None, ...] = ()

    def defer_to(self, queue: WeightGradQueue | None) -> None:
        """Lets the module defer to a queue from here on; None: not any more."""
        self._queue, self._num_hooks = queue, _num_hooks(self)
        self._own = tuple(self._parameters.values())

    def has_own(self, param: Tensor) -> bool:
        """Returns whether a forward runs on a parameter of this module, not on one that `functional_call` put there."""
        return any(param is own for own in self._own)

    def defer(self, x: Tensor, grad: Tensor, half: WeightHalf) -> bool:
        """Defers `half(x, grad, add)` if a queue is open.

        Returns whether it did; if not, the backward computes the gradients itself, and autograd tells hooks that were
        put on the parameters since `defer_to`.
        """
        queue = self._queue
        return queue is not None and _num_hooks(self) == self._num_hooks and queue.take(x, grad, half, self)


def as_it_is(x: Tensor) -> AbstractContextManager[Any]:
    """Turns autocast off: the caller has chosen the precision of the linear already."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Returns the precision in which autocast runs a linear, None where it leaves it alone."""
    kind = x.device.type
    lowers = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    double = x.dtype is torch.float64 or weight.dtype is torch.float64
    return torch.get_autocast_dtype(kind) if lowers and not double else None


class _Linear(torch.autograd.Function):
    """`functional.linear` in one precision, whose backward puts weight gradients into an open `WeightGradQueue`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, split: SplitForward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.split = split
        with as_it_is(x):
            out = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return _unsafe_view(out, out.shape) if out._is_view() else out  # autograd lets nobody write to a view from here

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        split: SplitForward = ctx.split
        again = torch.is_grad_enabled()  # with create_graph: what is computed here is differentiated itself
        with as_it_is(x):
            dx = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
            if not again and split.halves.take(x, grad, split.weight_half, split.linear):
                return dx, None, None, None
            flat = grad.flatten(0, -2)
            dw = (flat.t() @ x.flatten(0, -2)).to(weight.dtype) if ctx.needs_input_grad[1] else None
            db = flat.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


class SplitForward:
    """Replaces a linear's `forward`. Without gradients it is the plain one."""

    def __init__(self, linear: nn.Linear, halves: WeightGradQueue) -> None:
        self.linear, self.halves = linear, halves
        self._weight, self._bias = linear.weight, linear.bias
        self._num_hooks = _num_hooks(linear)

    def __call__(self, input: Tensor) -> Tensor:
        """Returns the linear's output, in autocast's precision if autocast is on."""
        linear, weight, bias = self.linear, self.linear.weight, self.linear.bias
        if not torch.is_grad_enabled() or input.dim() < 2 or _num_hooks(linear) != self._num_hooks:
            return functional.linear(input, weight, bias)  # autograd tells hooks that were put on the parameters since
        if weight is not self._weight or bias is not self._bias:
            return functional.linear(input, weight, bias)  # `functional_call` gave it others for this call
        lower = autocast_dtype(input, weight)
        if lower is not None:
            input = input.to(lower)
        elif input.dtype is not weight.dtype or (bias is not None and bias.dtype is not weight.dtype):
            return functional.linear(input, weight, bias)  # raises torch's own error
        out: Tensor = _Linear.apply(input, weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    def weight_half(self, x: Tensor, grad: Tensor, add: AddGradient) -> None:
        """Computes the gradients of weight and bias."""
        weight, bias, grad, x = self._weight, self._bias, grad.flatten(0, -2), x.flatten(0, -2)
        if weight.requires_grad:
            add(weight, OuterProduct(grad, x))
        if bias is not None and bias.requires_grad:
            add(bias, grad.sum(0))


def own_forward(module: nn.Module) -> Any:
    """Returns what was put in place of a module's `forward`, None where that is its class's or a `SplitForward`."""
    own = vars(module).get("forward")
    return None if isinstance(own, SplitForward) else own


@dataclass(frozen=True)
class WeightGradSplit:
    """How many weight gradients of a chunk can run apart. `why` is the reason if none can."""

    num_params: int
    num_deferred: int
    why: str | None
    linears: tuple[nn.Linear | DefersWeightGrad, ...]

    @property
    def possible(self) -> bool:
        """Returns whether any weight gradient can run apart."""
        return self.why is None

    def __str__(self) -> str:
        if self.why is not None:
            return f"backward runs whole: {self.why}"
        return f"{self.num_deferred} of {self.num_params} parameters get their gradient in wgrad"


def examine(module: nn.Module) -> WeightGradSplit:
    """Returns whether weight gradients of this module can run apart, and for how many of its parameters."""
    params = {p for p in module.parameters() if p.requires_grad}
    linears = tuple(_linears(module))
    deferred = {p for linear in linears for p in linear.parameters(recurse=False) if p.requires_grad}
    why = _against(module) or (None if deferred else "it has no nn.Linear that trains")
    return WeightGradSplit(len(params), len(deferred), why, linears)


def apply(linears: Sequence[nn.Linear | DefersWeightGrad], halves: WeightGradQueue) -> None:
    """Lets linears put their weight gradients into the queue `halves`."""
    for linear in linears:
        if isinstance(linear, DefersWeightGrad):
            linear.defer_to(halves)
        else:
            linear.forward = SplitForward(linear, halves)  # type: ignore[method-assign]


def restore(module: nn.Module) -> None:
    """Restores the linears' own `forward`; no module of this one defers any more."""
    for part in module.modules():
        if isinstance(part, DefersWeightGrad):
            part.defer_to(None)
        elif isinstance(part.__dict__.get("forward"), SplitForward):
            del part.__dict__["forward"]


def _linears(module: nn.Module) -> Iterator[nn.Linear | DefersWeightGrad]:
    """Yields modules that are exactly `nn.Linear`: a subclass or a changed one may compute something else.

    A `DefersWeightGrad` answers for its subclasses.
    """
    for part in module.modules():
        params = part._parameters  # a weight that is made from others by a hook is not there
        if part._forward_pre_hooks or any(p is not None and _has_hooks(p) for p in params.values()):
            continue
        if isinstance(part, DefersWeightGrad):
            if params:
                yield part
        elif type(part) is nn.Linear:
            plain = params.get("weight") is not None and "bias" in params
            if plain and own_forward(part) is None:
                yield part


def _has_hooks(param: Tensor) -> bool:
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


def _num_hooks(module: nn.Module) -> int:
    """Returns the number of gradient hooks on a module's parameters; float32 sums have one from the start."""
    return sum(
        len(hooks)
        for param in module._parameters.values()
        if param is not None
        for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)
        if hooks
    )


def _against(module: nn.Module) -> str | None:
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds; without it nothing is compiled
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    for name, part in module.named_modules():
        where = f" ({name})" if name else ""
        if isinstance(part, compiled) or part._compiled_call_impl is not None:
            return f"it is compiled{where}"
        if isinstance(part, torch.jit.ScriptModule):
            return f"it is scripted{where}"
    if any(type(p.data) is not Tensor for p in module.parameters()):
        return "its parameters are not plain tensors (DTensor?)"
    return None
