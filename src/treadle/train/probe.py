"""Finds where numbers stop to be finite: in which stage, layer, segment and value of a forward first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treadle.runtime.model.segments import ORDER, Segment, Segmented, is_segmented, tensors_in
from treadle.runtime.model.stage_blocks import children_of


@dataclass(frozen=True, order=True)
class BadOutput:
    """A value of a forward that is not finite. Those of earlier places come first."""

    stage: int
    place: int
    """Its place in the order of the stage's blocks and their segments."""

    rank: int = field(compare=False)
    block: str = field(compare=False)
    segment: str = field(compare=False)
    value: str = field(compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank}, stage {self.stage}, {self.block}: {self.segment} made {self.value} not finite"


class ForwardProbe:
    """Looks at what segments and blocks make, while it is on. It is put on stages before their Pipeline is made.

    Off, it costs a Python call a segment.
    """

    def __init__(self, stages: Mapping[int, nn.Module], numbers: Mapping[int, int], rank: int) -> None:
        self._on = False
        self._rank = rank
        self._found: list[BadOutput] = []  # lanes append from threads of their own
        self._whole: list[tuple[nn.Module, int, int]] = []
        for chunk, module in stages.items():
            for at, block in enumerate(children_of(module)):
                place = at * (len(ORDER) + 1)
                if is_segmented(block):
                    self._wrap(block, numbers[chunk], place)
                else:
                    self._whole.append((block, numbers[chunk], place))

    def _wrap(self, block: Segmented, stage: int, place: int) -> None:
        segments = block.segments

        def watched(segment: Segment) -> Segment:
            def run(*values: Any) -> Any:
                made = segment.run(*values)
                if self._on:
                    at = place + ORDER.index(segment.name)
                    self._look(made, segment.writes, (stage, at, _name_of(block), segment.name))
                return made

            return replace(segment, run=run)

        block.segments = lambda: [watched(segment) for segment in segments()]  # type: ignore[method-assign]

    def _look(self, made: Any, names: Sequence[str], where: tuple[int, int, str, str]) -> None:
        stage, place, block, segment = where
        for name, thing in zip(names, made if isinstance(made, tuple) else (made,), strict=False):
            if any(not_finite(tensor) for tensor in tensors_in(thing)):
                self._found.append(BadOutput(stage, place, self._rank, block, segment, name))
                return

    def first(self, forward: Callable[[], object]) -> BadOutput | None:
        """Run a forward and return the first value of this rank that is not finite."""
        self._found.clear()
        self._on = True
        hooks = [self._hook(*each) for each in self._whole]
        try:
            forward()
        finally:
            self._on = False
            for hook in hooks:
                hook.remove()
        return min(self._found, default=None)

    def _hook(self, block: nn.Module, stage: int, place: int) -> RemovableHandle:
        where = (stage, place, _name_of(block), "forward")
        return block.register_forward_hook(lambda _module, _inputs, made: self._look(made, ("output",), where))


def _name_of(block: object) -> str:
    number = getattr(block, "number", None)
    return f"layer {number}" if number is not None else type(block).__name__


def not_finite(tensor: Tensor) -> bool:
    """Return whether a tensor of floating point has NaN or infinity."""
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
