"""Costs of a layer, measured on this device: steps of a Pipeline of one rank whose middle stage is the layer.

Its input comes from a stage before it, so its dgrad is computed, and a stage after it holds the loss, so no time of
the loss counts. Backwards of even micro-batches run whole, those of odd ones split into dgrad and wgrad:

    rank 0  F0.0 F0.1 F0.2 B0.2 B0.1 B0.0  F1.0 F1.1 F1.2 B1.2 I1.1 W1.1 B1.0 ...
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from treadle.costs import Costs
from treadle.dist.backends import default_backend
from treadle.ir import Schedule
from treadle.ir.action import Action, B, F, I, W
from treadle.ir.ops import ACTIONS, OpKind
from treadle.ir.placement import Placement
from treadle.ir.trace import MICROSECONDS, Trace
from treadle.runtime.model.saved import SavedTensors
from treadle.runtime.model.segments import is_segmented
from treadle.runtime.pipeline import Pipeline

WARM_UP = 2
"""Steps before those that count: the first compiles, allocates and chooses kernels."""
NUM_MICROBATCHES = 4
_LAYER = 1
"""The stage that is the layer, between an input with a gradient and a loss."""


@dataclass(frozen=True)
class LayerTimes:
    """Medians over micro-batches, in nanoseconds. `i` and `w` are None where the backward cannot be split."""

    f: int
    b: int
    i: int | None
    w: int | None
    saved_bytes: int

    def costs(self, name: str, num_layers: int, about: str) -> Costs:
        """Return the costs of a model of so many of these layers."""
        times = {"f": self.f, "i": self.i, "w": self.w, "b": self.b, "saved_bytes": self.saved_bytes}
        whole = {key: value * num_layers for key, value in times.items() if value is not None}
        return Costs(name, MICROSECONDS, model={"layers": num_layers, **whole}, about=about)


def load_layer(named: str) -> nn.Module:
    """Return the layer that FILE.py:NAME names: a module, or what a class or function of that name makes.

    Raises:
        ValueError: the text is of another form, the file does not exist, or the name is no layer.

    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"a layer is named as FILE.py:NAME, my_layers.py:Block, got {named!r}")
    if not Path(file).is_file():
        raise ValueError(f"{file} does not exist; a layer is named as FILE.py:NAME, with the path of its file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, name, None)
    if made is None:
        raise ValueError(f"{file} defines no {name}")
    if callable(made) and not isinstance(made, nn.Module):
        made = made()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{named} is {type(made).__name__}; give a module, or a class or function that makes one")
    return made


def measure_layer(layer: nn.Module, shape: Sequence[int], num_steps: int, on_step: Callable[[int], None]) -> LayerTimes:
    """Run steps of a layer on its parameters' device, on random inputs of their dtype, and return its times.

    Raises:
        ValueError: the layer is no stage that takes one tensor and returns one, or a process group exists.

    """
    if dist.is_initialized():
        raise ValueError("measuring a layer makes a process group of one rank, and this process is in one")
    if is_segmented(layer):
        raise ValueError(
            f"{type(layer).__name__} names its segments, whose exchanges need other ranks; run steps of a Pipeline of "
            "it and fit its trace: treadle.fit(pipe.gather_trace())"
        )
    like = next(layer.parameters(), None)
    if like is None:
        raise ValueError(f"{type(layer).__name__} has no parameters; its device and dtype are those of its inputs")
    x = torch.randn(*shape, device=like.device).to(like.dtype)
    layer.train()
    saved = _saved_bytes(layer, x)
    backend = default_backend(like.device)
    world = "gloo" if backend == "gloo" else f"cpu:gloo,{like.device.type}:{backend}"
    dist.init_process_group(world, store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(like.device.type, (1,), mesh_dim_names=("pp",))
        stages = {0: _ScaledInput(like), _LAYER: layer, 2: nn.Identity()}
        pipe = Pipeline(stages, _schedule(), mesh=mesh, loss_fn=_loss)
        try:
            traces = [_step(pipe, x, number, on_step) for number in range(WARM_UP + num_steps)][WARM_UP:]
        finally:
            pipe.close()
    finally:
        dist.destroy_process_group()
    times = {kind.cost_key: _median(traces, kind) for kind in ACTIONS}
    forward, backward = times["f"], times["b"]
    assert forward is not None
    assert backward is not None
    return LayerTimes(forward, backward, times["i"], times["w"], saved)


class _ScaledInput(nn.Module):
    """Gives the layer's input a gradient."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), device=like.device, dtype=like.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _schedule() -> Schedule:
    row: list[Action] = []
    for mb in range(NUM_MICROBATCHES):
        backward = (B(mb, _LAYER),) if mb % 2 == 0 else (I(mb, _LAYER), W(mb, _LAYER))
        row += [F(mb, 0), F(mb, 1), F(mb, 2), B(mb, 2), *backward, B(mb, 0)]
    return Schedule("one layer", Placement.loop(1, 3), NUM_MICROBATCHES, (tuple(row),))


def _loss(output: Tensor, _: object) -> Tensor:
    return output.float().square().mean()


def _saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, its input among them, and no parameter."""
    saved = SavedTensors([layer], None)
    saved.begin()
    try:
        with saved.saving((0, 0, 0), "layer"):
            output = layer(x.detach().requires_grad_())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{type(layer).__name__} on an input of {tuple(x.shape)}, {x.dtype}: {error}") from error
    if not isinstance(output, Tensor):
        raise ValueError(f"{type(layer).__name__} returns {type(output).__name__}; a layer to measure returns a tensor")
    return saved.sizes[(0, 0, 0), "layer"]


def _step(pipe: Pipeline, x: Tensor, number: int, on_step: Callable[[int], None]) -> Trace:
    pipe.step([x] * NUM_MICROBATCHES, [None] * NUM_MICROBATCHES)
    on_step(number)
    return pipe.gather_trace()


def _median(traces: Sequence[Trace], kind: OpKind) -> int | None:
    durations = []
    for trace in traces:
        program = trace.program
        chosen = (program.kind == kind) & (program.chunk == _LAYER)
        durations += (trace.end - trace.start)[chosen].tolist()
    return round(median(durations)) if durations else None
