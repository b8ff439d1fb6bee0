"""Calls a stage's modules as torch does, one layer after the other.

A stage that is an `nn.Sequential` runs layer by layer, so that each layer gets its seed and the side values it takes.
Hooks on the `nn.Sequential` run all the same, and so does a `forward` that was put in place of its own, or a compiled
one. All of them may come, change and go between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from treadle.runtime.model.seeding import may_draw
from treadle.runtime.model.side import Keywords, Side
from treadle.runtime.model.weight_grad import own_forward

Start = Callable[[int], None]
"""Gets the number of a layer that may draw random numbers, before it runs."""


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Returns the layers of a stage: the children of an `nn.Sequential`, or the module itself.

    An `nn.Sequential` with a `forward` of its own, or compiled, runs whole.
    """
    if type(module) is not nn.Sequential or len(module) == 0 or module._compiled_call_impl is not None:
        return [module]
    return list(module) if own_forward(module) is None else [module]


class Layer(NamedTuple):
    """A module, the side values that it takes, and whether it may draw random numbers."""

    module: nn.Module
    keywords: Keywords
    draws: bool


class LayerCalls:
    """The calls of a stage's modules: those of `layers` where these are given, else all layers of `module`."""

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module] | None = None) -> None:
        self._module, self._given = module, layers
        self._layers: list[Layer] = []
        self._seen: tuple[Any, ...] | None = None
        self._is_sequence = False
        self.refresh()

    def refresh(self) -> None:
        """Look at the modules again: since then a `forward` may have been replaced, a hook added, a dropout raised."""
        layers = list(self._given) if self._given is not None else layers_of(self._module)
        seen = layers, [own_forward(layer) for layer in layers], [may_draw(layer) for layer in layers]
        if self._seen == seen:
            return
        self._layers = [Layer(layer, Keywords(layer), draws) for layer, draws in zip(layers, seen[2], strict=True)]
        self._is_sequence = self._given is None and layers != [self._module]
        self._seen = seen

    def __bool__(self) -> bool:
        return bool(self._layers)

    def __call__(self, inputs: tuple[Any, ...], side: Side, start: Start | None = None) -> Any:
        """Runs the modules on a micro-batch, each with the side values that it takes."""
        module = self._module
        if self._is_sequence and (has_hooks(module) or _has_any_global_hook()):  # type: ignore[no-untyped-call]
            vars(module)["forward"] = partial(self._run, side, start)
            try:
                return module(*inputs)
            finally:
                del vars(module)["forward"]
        return self._run(side, start, *inputs)

    def _run(self, side: Side, start: Start | None, *inputs: Any) -> Any:
        """By place, not by hooks: one module may stand at several places."""
        made: Any = inputs
        for number, (layer, keywords, draws) in enumerate(self._layers):
            if draws and start is not None:
                start(number)
            given = made if number == 0 else (made,)
            made = layer(*given, **keywords.of(side, len(given)))
        return made


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a call of the module itself runs hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
