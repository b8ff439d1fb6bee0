"""Makes randomness independent of the schedule: each layer starts each micro-batch from a seed of its own.

The seed is made of (seed, step, micro-batch, layer), where layers are numbered along the model and micro-batches over
the global batch. So dropout drops the same elements in one process and in any pipeline, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import nn

from treadle.runtime.model.weight_grad import own_forward

_MASK = (1 << 63) - 1
_CHANCES = ("p", "dropout", "dropout_p")  # of nn.Dropout and its like, of attention, of recurrent modules
_LOSS_PART = (1 << 15) - 1  # no segment of a layer comes near
_ALWAYS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def step_seed(seed: int, step: int) -> int:
    """Returns a number for a step, far from that of the next step (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + step + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (z ^ (z >> 31)) & _MASK


def layer_seed(base: int, mb: int, layer: int, num_layers: int) -> int:
    """Returns the seed of a layer for a micro-batch, in the step with the number `base`."""
    return base + mb * num_layers + layer


def may_draw(layer: nn.Module) -> bool:
    """Returns whether a layer may draw random numbers: torch's modules by their type, any other module always.

    So may a hook, and a `forward` that was put in place of torch's.
    """
    for part in layer.modules():
        if not type(part).__module__.startswith("torch.nn.modules."):
            return True
        if part._forward_hooks or part._forward_pre_hooks or own_forward(part) is not None:
            return True
        if any(vars(part).get(name) for name in _CHANCES) or isinstance(part, _ALWAYS):
            return True
    return False


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator that random ops on this device use by default."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    made: torch.Generator = torch.get_device_module(device).default_generators[index]
    return made


_runs: list[tuple[torch.Generator, bool]] = []
"""The runs of this process's Pipelines: the generator of a device, which they share, and whether a run seeds it."""
_lock = Lock()


@contextmanager
def drawing(generator: torch.Generator, *, seeds: bool, restores: bool) -> Iterator[None]:
    """Wraps a run of a Pipeline, which `seeds` the generator or draws from it as it is; `restores` its state behind it.

    Raises ValueError if another Pipeline is in a run and either seeds: it would seed between the other's draws.
    """
    with _lock:
        if any(other is generator and (seeds or seeded) for other, seeded in _runs):
            raise ValueError(
                "another Pipeline of this process is in a step, in another thread, and torch has one generator for "
                f"{generator.device}, which a Pipeline with a seed seeds: dropout would depend on their timing; run "
                "one step after the other, or make both with seed=None, which leaves the generator alone"
            )
        _runs.append((generator, seeds))
    state = generator.get_state() if restores else None
    try:
        yield
    finally:
        if state is not None:
            generator.set_state(state)
        with _lock:
            _runs.remove((generator, seeds))


class RandomState:
    """The state of the generators that a segment draws from: the device's, and the host's."""

    def __init__(self, device: torch.device) -> None:
        generators = dict.fromkeys((torch.default_generator, generator_of(device)))
        self._states = [(generator, generator.get_state()) for generator in generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draws the same numbers again within the block; behind it the generators are as they were."""
        now = [(generator, generator.get_state()) for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


class Seeds:
    """The seeds of one stage's layers. `first` is the number of its first layer, of `num_layers` in the model."""

    def __init__(self, device: torch.device, first: int, num_layers: int) -> None:
        self._generator, self._first, self._num_layers = generator_of(device), first, num_layers
        self._base = 0
        self._mb = 0

    def begin_step(self, base: int) -> None:
        """Starts a step with its own number."""
        self._base = base

    def begin_microbatch(self, mb: int) -> None:
        """Start a micro-batch of the global batch; hooks of the stage draw from here before its first layer."""
        self._mb = mb
        self._start(0)

    def begin_layer(self, number: int) -> None:
        """Seeds a layer of the stage."""
        self._start(number)

    def begin_segment(self, mb: int, layer: int, part: int) -> None:
        """Seeds a segment of a layer. The first segment starts from the seed of the whole layer."""
        self._mb = mb
        self._start(layer, part << 48)

    def begin_loss(self, mb: int) -> None:
        """Seed `loss_fn` for a micro-batch of the global batch, apart from the layer before it."""
        self._mb = mb
        self._start(self._num_layers - 1 - self._first, _LOSS_PART << 48)

    def _start(self, number: int, shift: int = 0) -> None:
        seed = layer_seed(self._base, self._mb, self._first + number, self._num_layers)
        self._generator.manual_seed((seed + shift) & _MASK)


def seed_layer(device: torch.device, seed: int, step: int, mb: int, layer: int, num_layers: int) -> None:
    """Seeds as a pipeline does before a layer of a micro-batch, so that a plain run can be compared with it."""
    generator_of(device).manual_seed(layer_seed(step_seed(seed, step), mb, layer, num_layers) & _MASK)
