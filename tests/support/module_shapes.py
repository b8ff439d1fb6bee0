"""Modules in the shapes in which people write them: what a pipeline does with each, one process does too.

A shape is a row of `SHAPES`: a small module that maps [samples, tokens, WIDTH] to the same size, in float64, and what
is put on it before and after a Pipeline is made of it. `make_stages` builds a model of it: plain stages, or stages of
layers in segments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.support.cases import MOST_DIFFERENCE
from tests.support.devices import drawn
from treadle.runtime.model.segments import Segment, compute

WIDTH, SAMPLES, TOKENS, ROWS = 8, 2, 3, 11

Make = Callable[[], nn.Module]
Change = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Shape:
    """A module, and what is done to it: `early` before a Pipeline is made of its stage, `late` after.

    `inner` makes it; `stage` makes a whole stage from its number and how many there are, for shapes of several tensors.
    `early` and `late` get the stage. `plain`: never in segments. `most` is how much gradients may differ.
    """

    inner: Make = lambda: nn.Linear(WIDTH, WIDTH)
    stage: Callable[[int, int], nn.Module] | None = None
    early: Change | None = None
    late: Change | None = None
    plain: bool = False
    most: float = MOST_DIFFERENCE

    @property
    def grains(self) -> tuple[str, ...]:
        """The grains at which it can be a stage."""
        return ("plain",) if self.plain or self.stage is not None else ("plain", "layers")


class Block(nn.Module):
    """A residual block around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 2), nn.Linear(WIDTH + 2, WIDTH)

    def attn(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.first(x))
        return out

    def mlp(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(torch.tanh(self.up(h)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Layer(Block):
    """The same in segments."""

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h"),
            compute("mlp", self.mlp, reads="h", writes="x"),
        ]


@contextmanager
def in_float64() -> Iterator[None]:
    """Makes modules in float64, except where they name another type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_stages(shape: Shape, num_stages: int, grain: str) -> list[nn.Module]:
    """A model of a shape, always the same one, with `early` done to it."""
    torch.manual_seed(5)
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's old weight_norm
        stages = [_stage(shape, number, num_stages, grain) for number in range(num_stages)]
    if shape.early is not None:
        for stage in stages:
            shape.early(stage)
    return stages


def _stage(shape: Shape, number: int, num_stages: int, grain: str) -> nn.Module:
    if shape.stage is not None:
        return shape.stage(number, num_stages)
    if grain == "layers":
        before = [nn.Linear(WIDTH, WIDTH)] if number == 0 else []
        behind = [nn.Linear(WIDTH, WIDTH)] if number == num_stages - 1 else []
        return nn.Sequential(*before, Layer(shape.inner()), *behind)
    if number % 2:
        return Block(shape.inner())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), shape.inner())  # what it returns crosses to the next stage


def make_batch(num_mb: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(number)
    x, y = drawn(torch.randn, 2, num_mb * SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def inner_of(stage: nn.Module) -> nn.Module:
    """The module that a shape made, wherever its stage has it."""
    blocks = [part for part in stage.modules() if isinstance(part, Block)]
    return blocks[0].inner if blocks else cast(nn.Sequential, stage)[1]


# -- modules -----------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """`call(parts, x)` as a module, with its parts by name."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def linear(**more: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **more)


def square_parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)


class Cube(torch.autograd.Function):
    """x**3, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = grad * 3 * x**2
        return out


def cubed(m: Any, x: Tensor) -> Tensor:
    out: Tensor = Cube.apply(m.linear(x))  # type: ignore[no-untyped-call]
    return out


def with_views(m: Any, x: Tensor) -> Tensor:
    """One parameter: whole, sliced, transposed, and as the weight of a linear."""
    out: Tensor = x @ m.w + x[..., :4] @ m.w[:4] + (x @ m.w.t()) * m.w.view(-1)[:WIDTH] + m.linear(x)
    return out


def by_rows(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.norm(x.flatten(0, 1)).view_as(x)
    return x + out


def convolved(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.conv(x.transpose(1, 2)).transpose(1, 2)
    return out


def expanded(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).mean(1, keepdim=True).expand_as(x)
    return out


def lowered(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        low: Tensor = m.low(x.float())
    return x + low.to(x.dtype)


def sometimes(m: Any, x: Tensor) -> Tensor:
    """One or the other linear, by what came; a third never."""
    out: Tensor = m.one(x) if float(x.detach().sum()) > 0 else m.other(x)
    return out


def looked_up(m: Any, x: Tensor) -> Tensor:
    numbers = (x.detach()[..., 0] * 7).long() % ROWS
    out: Tensor = x + m.table(numbers)
    return out


def table(**more: Any) -> Make:
    return lambda: Apply(looked_up, table=nn.Embedding(ROWS, WIDTH, **more))


def written_to(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    y += x
    y.mul_(1.5)
    y.tanh_()
    return y


def with_other_weights(m: Any, x: Tensor) -> Tensor:
    made = {"weight": m.a * m.b, "bias": m.a.sum(0)}
    out: Tensor = functional_call(m.linear, made, (x,)) + functional_call(m.linear, {"weight": m.b}, (x,)) + m.linear(x)
    return out


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def adapted() -> nn.Module:
    """A frozen linear beside two of low rank that train."""
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    return Apply(lambda m, x: m.base(x) + m.up(m.down(x)), base=frozen(linear()), down=down, up=up)


def pruned() -> nn.Module:
    made = linear()
    prune.l1_unstructured(made, "weight", 0.5)  # type: ignore[no-untyped-call]
    return made


def again(reentrant: bool) -> Make:
    return lambda: Apply(
        lambda m, x: checkpoint(lambda x: torch.tanh(m.two(torch.tanh(m.one(x)))), x, use_reentrant=reentrant),
        one=linear(),
        two=linear(),
    )


class Unusual(nn.Module):
    """A parameter without elements, one without dimensions, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.one = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(()))
        self.unused, self.linear = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.one + self.none.sum()
        return out


# -- stages of several tensors -----------------------------------------------------------------------------------------


class Several(nn.Module):
    """A stage whose neighbours exchange two tensors, in the way that `kind` says."""

    def __init__(self, kind: str, number: int, num_stages: int) -> None:
        super().__init__()
        self.kind, self.is_last = kind, number == num_stages - 1
        self.linear, self.extra = linear(), linear()

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        reads = self.kind != "unread"
        y = torch.tanh(self.linear(x + other if reads and other is not None else x))
        if self.is_last:
            return y
        if self.kind == "twice":
            return y, y
        if self.kind == "input":
            return y, x
        return y, self.extra(x)


def several(kind: str) -> Shape:
    return Shape(stage=lambda number, num_stages: Several(kind, number, num_stages))


def with_frozen_end(end: int) -> Shape:
    def make(number: int, num_stages: int) -> nn.Module:
        stage = nn.Sequential(linear(), nn.Tanh(), linear())
        return frozen(stage) if number == end % num_stages else stage

    return Shape(stage=make)


# -- what is put on modules --------------------------------------------------------------------------------------------


def scaled(grads: Any, factor: float) -> Any:
    return tuple(None if grad is None else grad * factor for grad in grads)


HOOKS: dict[str, Change] = {
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda _, given: (given[0] * 1.1,)),
    "forward hook": lambda m: m.register_forward_hook(lambda _, given, made: made * 0.9 + given[0].mean()),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda _, grads: scaled(grads, 1.2)),
    "backward hook": lambda m: m.register_full_backward_hook(lambda _, given, grads: scaled(given, 0.7)),
}
"""Each changes what passes by it."""


def replace_forward(module: nn.Module) -> None:
    """Puts another `forward` in place, which calls the one there was."""
    before = module.forward
    module.forward = lambda x: 0.5 * before(torch.tanh(x))


CHANGES: dict[str, Change] = {**HOOKS, "replaced forward": replace_forward}


def on_linears(change: Change) -> Change:
    """The change, to the last linear of a stage."""
    return lambda stage: change([part for part in stage.modules() if isinstance(part, nn.Linear)][-1])


def on_inner(change: Change) -> Change:
    return lambda stage: change(inner_of(stage))


def in_sequence(number: int, num_stages: int) -> nn.Module:
    del number, num_stages
    return nn.Sequential(linear(), nn.Tanh(), linear())


def hook_weights(stage: nn.Module) -> None:
    for part in stage.modules():
        if isinstance(part, nn.Linear):
            part.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]


def changed_stages() -> Iterator[tuple[str, Shape]]:
    """All hooks and a replaced `forward`, on a stage and on modules in it, before and after a Pipeline is made."""
    for name, change in CHANGES.items():
        yield f"{name} on a stage", Shape(stage=in_sequence, early=change)
        yield f"late {name} on a stage", Shape(stage=in_sequence, late=change)
        yield f"{name} on a module", Shape(lambda: nn.Sequential(linear(), nn.Tanh()), early=on_inner(change))
        yield f"late {name} on a module", Shape(lambda: nn.Sequential(linear(), nn.Tanh()), late=on_inner(change))
        yield f"late {name} on a linear", Shape(late=on_linears(change))


SHAPES: dict[str, Shape] = {
    "module twice": Shape(lambda: Apply(lambda m, x: m.linear(torch.tanh(m.linear(x))), linear=linear())),
    "parameter twice and as views": Shape(lambda: Apply(with_views, w=square_parameter(), linear=linear())),
    "BatchNorm": Shape(lambda: Apply(by_rows, norm=nn.BatchNorm1d(WIDTH))),
    "autograd function": Shape(lambda: Apply(cubed, linear=linear())),
    "checkpoint": Shape(again(reentrant=False)),
    "reentrant checkpoint": Shape(again(reentrant=True)),
    "autocast inside": Shape(lambda: Apply(lowered, low=linear(dtype=torch.float32)), most=1e-5),
    "weight norm": Shape(lambda: parametrizations.weight_norm(linear())),
    "old weight norm": Shape(lambda: nn.utils.weight_norm(linear())),
    "orthogonal": Shape(lambda: parametrizations.orthogonal(linear())),
    "pruned": Shape(pruned),
    "GRU": Shape(lambda: Apply(lambda m, x: m.gru(x)[0], gru=nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "attention": Shape(
        lambda: Apply(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    ),
    "conv": Shape(lambda: Apply(convolved, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "bilinear": Shape(lambda: Apply(lambda m, x: m.both(x, x), both=nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    "expanded output": Shape(lambda: Apply(expanded, linear=linear())),
    "transposed output": Shape(
        lambda: Apply(lambda m, x: m.linear(x).transpose(1, 2).contiguous().transpose(1, 2), linear=linear())
    ),
    "conditional use": Shape(lambda: Apply(sometimes, one=linear(), other=linear(), never=linear())),
    "LoRA": Shape(adapted),
    "frozen part": Shape(lambda: nn.Sequential(frozen(linear()), nn.Tanh(), linear())),
    "frozen module": Shape(lambda: frozen(nn.Sequential(linear(), nn.Tanh(), linear()))),
    "frozen first stage": with_frozen_end(0),
    "frozen last stage": with_frozen_end(-1),
    "embedding with padding": Shape(table(padding_idx=0)),
    "embedding scaled by frequency": Shape(table(scale_grad_by_freq=True)),
    "embedding with max_norm": Shape(table(max_norm=1.0)),
    "sparse embedding": Shape(table(sparse=True)),
    "unusual parameters": Shape(Unusual),
    "weights of another call": Shape(
        lambda: Apply(with_other_weights, linear=linear(), a=square_parameter(), b=square_parameter())
    ),
    "in place behind a linear": Shape(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True))),
    "in place behind a linear without bias": Shape(lambda: nn.Sequential(linear(bias=False), nn.ReLU(inplace=True))),
    "adds in place": Shape(lambda: Apply(written_to, linear=linear())),
    "hooked weights": Shape(early=hook_weights),
    "late hooked weights": Shape(late=hook_weights),
    "tuples": several("tuples"),
    "input returned": several("input"),
    "output twice": several("twice"),
    "output that nobody reads": several("unread"),
    **dict(changed_stages()),
}
