"""A segment that is recomputed: its forward keeps its inputs alone, and runs once more before its backward.

The forward runs under autograd as any other does, so that it takes the same kernels, and lets go of its graph. What
it wrote stays: values, auxiliary losses and buffers count once. When the Program says so the segment runs again on the
inputs that it kept, with the random numbers that it had, on copies of the buffers that it writes.

A forward whose result depends on a buffer that forwards change, or on a counter of its own in Python, finds another
number there the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

from treadle.runtime.model.edge import edge_of
from treadle.runtime.model.saved.saved_store import Handle, InPlace
from treadle.runtime.model.seeding import RandomState
from treadle.runtime.model.segments import Cut, Segment, Value, rebuilt, refuse_void, run_segment

Pack: TypeAlias = Callable[[Tensor], "Handle | InPlace"]
"""Takes a tensor into safe keeping until the segment runs again."""


@dataclass
class Kept:
    """One segment of one micro-batch, between its forward and its recomputation."""

    segment: Segment
    inputs: list[tuple[Value, Any]]
    """The values it read, whose gradients its backward adds to, and their things as they were packed."""
    outputs: list[Value]
    random: RandomState
    buffers: LayerBuffers

    @classmethod
    def forward(
        cls, segment: Segment, values: dict[str, Value], pack: Pack, random: RandomState, buffers: LayerBuffers
    ) -> Kept:
        """Runs a segment on the values it reads, and puts what it writes among them."""
        read = [values[name] for name in segment.reads]
        refuse_void(segment, read)
        inputs = [(value, rebuilt(value.thing, Tensor, pack)) for value in read]

        def refuse(_: object) -> NoReturn:
            raise ValueError(
                f"segment {segment.name} takes gradients within its forward, and keeps nothing to take them from, as "
                f"it is recomputed; leave {segment.name} out of `recompute`"
            )

        with buffers.watched(), saved_tensors_hooks(_drop, refuse):
            Cut.forward(segment, values)
        return cls(segment, inputs, [values[name] for name in segment.writes], random, buffers)

    def again(self) -> Cut:
        """Runs the segment again; what it returns is where its backward starts."""
        inputs = [value.read_as(rebuilt(packed, (Handle, InPlace), _unpack)) for value, packed in self.inputs]
        self.inputs = []
        with self.random.again(), self.buffers.aside():
            things = run_segment(self.segment, inputs)
        outputs = []
        for name, value, thing in zip(self.segment.writes, self.outputs, things, strict=True):
            if value.needs_grad and not (isinstance(thing, Tensor) and thing.requires_grad):
                raise ValueError(
                    f"segment {self.segment.name} wrote a {name} that needs a gradient, and another without one when "
                    "it was recomputed; a segment of `recompute` does the same both times"
                )
            if value.needs_grad:
                outputs.append((value, edge_of(thing)))
        return Cut(outputs)


def _drop(_: Tensor) -> None:
    """Saves nothing: the segment runs again."""


def _unpack(packed: Handle | InPlace) -> Tensor:
    return packed.tensor()


class LayerBuffers:
    """The buffers of a layer: those that a forward writes are copies when it runs again.

    A module that wrote one buffer may have written all of its own: torch's norms do without telling autograd.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [part for part in module.modules() if part._buffers]
        self._written: set[nn.Module] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which modules write buffers within the block."""
        before = [_versions(part) for part in self._modules]
        yield
        for part, known in zip(self._modules, before, strict=True):
            norm = isinstance(part, _NormBase) and part.training
            if norm or _versions(part) != known:
                self._written.add(part)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Gives the modules that write buffers copies of them for the block."""
        originals = [(part, dict(part._buffers)) for part in self._written]
        for part, buffers in originals:
            part._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for part, buffers in originals:
                part._buffers.update(buffers)


def _versions(module: nn.Module) -> Sequence[tuple[int, int]]:
    """Returns what changes with a buffer: which tensor it is, and how often it was written."""
    return [(id(b), b._version) for b in module._buffers.values() if b is not None]
