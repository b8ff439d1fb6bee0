"""Randomness that does not depend on the schedule: each layer starts each micro-batch from a seed of its own.

The seed is made of (seed, step, micro-batch, layer), where layers are numbered along the model and micro-batches over
the global batch. So dropout drops the same whether a model runs in one process or in any pipeline, in any order.
"""

from __future__ import annotations

import torch
from torch import nn

_MASK = (1 << 63) - 1
_CHANCES = ("p", "dropout", "dropout_p")  # of nn.Dropout and its like, of attention, of recurrent modules
_ALWAYS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def step_seed(seed: int, step: int) -> int:
    """A number for a step, far from that of the next (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + step + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (z ^ (z >> 31)) & _MASK


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage: the children of an `nn.Sequential`, or the module itself."""
    return list(module) if type(module) is nn.Sequential and len(module) > 0 else [module]


def may_draw(layer: nn.Module) -> bool:
    """Can a layer use randomness. torch's own modules tell by what they hold; of any other module it is not known."""
    for part in layer.modules():
        if not type(part).__module__.startswith("torch.nn.modules."):
            return True
        if any(getattr(part, name, 0) for name in _CHANCES) or isinstance(part, _ALWAYS):
            return True
    return False


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random ops on this device take by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class Seeds:
    """The seeds of one stage's layers. `first` is the number of its first layer, of `num_layers` in the model."""

    def __init__(self, module: nn.Module, device: torch.device, first: int, num_layers: int) -> None:
        self._generator, self._first, self._num_layers = generator_of(device), first, num_layers
        self._base = 0
        self._mb = 0
        layers = layers_of(module)
        self._whole = len(layers) == 1 and may_draw(module)
        self._hooks = [
            layer.register_forward_pre_hook(lambda *_, number=number: self._start(number))
            for number, layer in enumerate(layers)
            if len(layers) > 1 and may_draw(layer)
        ]

    def begin_step(self, base: int) -> None:
        """Starts a step with its own number."""
        self._base = base

    def begin(self, mb: int) -> None:
        """What runs now, forward or recomputed, is of this micro-batch of the global batch."""
        self._mb = mb
        if self._whole:
            self._start(0)

    def begin_segment(self, mb: int, layer: int, part: int) -> None:
        """What runs now is this part of a layer; the first part starts where the whole layer would."""
        self._mb = mb
        self._start(layer, part << 48)

    def _start(self, number: int, shift: int = 0) -> None:
        self._generator.manual_seed((self._base + self._mb * self._num_layers + self._first + number + shift) & _MASK)

    def close(self) -> None:
        """Takes the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()


def seed_layer(device: torch.device, seed: int, step: int, mb: int, layer: int, num_layers: int) -> None:
    """What a pipeline does before a layer of a micro-batch, for a run without one to be compared with."""
    generator_of(device).manual_seed((step_seed(seed, step) + mb * num_layers + layer) & _MASK)
