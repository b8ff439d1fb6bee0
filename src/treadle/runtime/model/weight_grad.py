"""Runs a linear's weight gradient apart: its input gradient in I, its weight gradient when the schedule has W.

During I each `nn.Linear` of the chunk computes only the gradient of its input, and queues its input and the gradient of
its output. W multiplies the two. No graph is kept or walked for W, and nothing else that autograd saved stays alive in
between. All other parameters (norms, embeddings, parameters of custom modules) get their gradients in I, so gradients
never depend on how many could be deferred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

AddGradient = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class WeightGrad:
    """A deferred weight gradient of one linear: its input and its output gradient."""

    linear: nn.Linear
    x: Tensor
    grad: Tensor

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that it keeps alive."""
        return self.x.nbytes + self.grad.nbytes

    def run(self, add: AddGradient) -> None:
        """Computes the gradients of weight and bias."""
        grad, x = self.grad.flatten(0, -2), self.x.flatten(0, -2)
        if self.linear.weight.requires_grad:
            add(self.linear.weight, grad.t() @ x)
        if self.linear.bias is not None and self.linear.bias.requires_grad:
            add(self.linear.bias, grad.sum(0))


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

    def take(self, linear: nn.Linear, x: Tensor, grad: Tensor) -> bool:
        """Defers a weight gradient if the queue is open; returns whether it did."""
        if self._open is None:
            return False
        self._open.append(WeightGrad(linear, x.detach(), grad))  # the graph behind x would stay alive with it
        return True


def _as_it_is(x: Tensor) -> AbstractContextManager[Any]:
    """Turns autocast off: the caller has chosen the precision of the linear already."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _Linear(torch.autograd.Function):
    """`functional.linear` in one precision, whose backward puts weight gradients into an open `WeightGradQueue`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, halves: WeightGradQueue, linear: nn.Linear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.halves, ctx.linear = halves, linear
        with _as_it_is(x):
            return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        again = torch.is_grad_enabled()  # with create_graph: what is computed here is differentiated itself
        with _as_it_is(x):
            dx = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
            if not again and ctx.halves.take(ctx.linear, x, grad):
                return dx, None, None, None, None
            flat = grad.flatten(0, -2)
            dw = (flat.t() @ x.flatten(0, -2)).to(weight.dtype) if ctx.needs_input_grad[1] else None
            db = flat.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


class SplitForward:
    """Replaces a linear's `forward`. Without gradients it is the plain one."""

    def __init__(self, linear: nn.Linear, halves: WeightGradQueue) -> None:
        self.linear, self.halves = linear, halves
        self._num_hooks = _num_hooks(linear)

    def __call__(self, input: Tensor) -> Tensor:
        """Returns the linear's output, in autocast's precision if autocast is on."""
        linear, weight, bias = self.linear, self.linear.weight, self.linear.bias
        if not torch.is_grad_enabled() or input.dim() < 2 or _num_hooks(linear) != self._num_hooks:
            return functional.linear(input, weight, bias)  # autograd tells hooks that were put on the parameters since
        kind = input.device.type
        lowers = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if (
            lowers and input.dtype is not torch.float64 and weight.dtype is not torch.float64
        ):  # autocast leaves it alone
            input = input.to(torch.get_autocast_dtype(kind))
        elif input.dtype is not weight.dtype or (bias is not None and bias.dtype is not weight.dtype):
            return functional.linear(input, weight, bias)  # raises torch's own error
        out: Tensor = _Linear.apply(input, weight, bias, self.halves, linear)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class WeightGradSplit:
    """How many weight gradients of a chunk can run apart. `why` is the reason if none can."""

    num_params: int
    num_deferred: int
    why: str | None
    linears: tuple[nn.Linear, ...]

    @property
    def possible(self) -> bool:
        """Returns whether any weight gradient can run apart."""
        return self.why is None

    def __str__(self) -> str:
        if self.why is not None:
            return f"backward runs whole: {self.why}"
        return f"{self.num_deferred} of {self.num_params} parameters get their gradient in the weight half"


def examine(module: nn.Module) -> WeightGradSplit:
    """Returns whether weight gradients of this module can run apart, and for how many of its parameters."""
    params = {p for p in module.parameters() if p.requires_grad}
    linears = tuple(_linears(module))
    deferred = {p for linear in linears for p in linear.parameters(recurse=False) if p.requires_grad}
    why = _against(module) or (None if deferred else "it has no nn.Linear that trains")
    return WeightGradSplit(len(params), len(deferred), why, linears)


def apply(linears: Sequence[nn.Linear], halves: WeightGradQueue) -> None:
    """Lets linears put their weight gradients into the queue `halves`."""
    for linear in linears:
        linear.forward = SplitForward(linear, halves)  # type: ignore[method-assign]


def restore(module: nn.Module) -> None:
    """Restores the linears' own `forward`."""
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), SplitForward):
            del part.__dict__["forward"]


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    """Yields modules that are exactly `nn.Linear`: a subclass or a changed one may compute something else."""
    for part in module.modules():
        own = part.__dict__.get("forward")
        if type(part) is not nn.Linear or not (own is None or isinstance(own, SplitForward)):
            continue
        params = part._parameters  # a weight that is made from others by a hook is not there
        plain = params.get("weight") is not None and "bias" in params and not part._forward_pre_hooks
        if plain and not any(p is not None and _has_hooks(p) for p in params.values()):
            yield part


def _has_hooks(param: Tensor) -> bool:
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


def _num_hooks(linear: nn.Linear) -> int:
    """Returns the number of gradient hooks on a linear's parameters; float32 sums have one from the start."""
    return sum(
        len(hooks)
        for param in (linear.weight, linear.bias)
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
