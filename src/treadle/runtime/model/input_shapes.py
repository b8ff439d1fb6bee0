"""The shapes of a step's inputs, which only ranks with a first stage see."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from treadle.runtime.model.chunk import Chunk

_PLAIN = (bool, int, float, str, type(None))


class InputShapes:
    """The shapes of a step's inputs, beside those of the step before.

    `each[chunk]` are those of a first stage's micro-batches, in their order.
    """

    def __init__(self) -> None:
        self.each: dict[int, list[Hashable]] = {}
        self._before: dict[int, list[Hashable]] = {}

    def take(self, stages: Mapping[int, Chunk]) -> None:
        """Take the inputs that first stages were given for a step."""
        self._before = self.each
        self.each = {
            chunk: [_shape_of(microbatch.given()[0]) for microbatch in stage.microbatches()]
            for chunk, stage in stages.items()
            if stage.number == 0
        }

    @property
    def differ(self) -> bool:
        """Whether inputs of a stage differ among each other, or from those of the step before."""
        return any(len({*each, *self._before.get(chunk, [])}) > 1 for chunk, each in self.each.items())


def _shape_of(given: Any) -> Hashable:
    """Return a value that is equal for inputs of one shape. Where a shape may hide it is equal to no other."""
    if isinstance(given, Tensor):
        return tuple(given.shape), given.dtype
    if isinstance(given, (tuple, list)):
        return type(given), tuple(map(_shape_of, given))
    if isinstance(given, dict):
        return tuple((key, _shape_of(value)) for key, value in given.items())
    return (type(given), given) if isinstance(given, _PLAIN) else object()
