"""The shapes of a step's inputs, which only ranks with a first stage see: whether its micro-batches differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from treadle.runtime.model.chunk import Chunk

_UNSEEN = "no step yet"
_PLAIN = (bool, int, float, str, type(None))


class InputShapes:
    """The shapes of the last step's inputs, by chunk."""

    def __init__(self) -> None:
        self._last: dict[int, Hashable] = {}

    def differ(self, stages: Mapping[int, Chunk]) -> bool:
        """Take the inputs that first stages were given; return whether they differ among each other or from the last.

        Always False for a rank without a first stage.
        """
        found = False
        for chunk, stage in stages.items():
            if stage.number == 0:
                shapes = {_shape_of(microbatch.given()[0]) for microbatch in stage.microbatches()}
                shape = next(iter(shapes)) if len(shapes) == 1 else None
                found |= shape is None or self._last.get(chunk, _UNSEEN) not in (_UNSEEN, shape)
                self._last[chunk] = shape
        return found


def _shape_of(given: Any) -> Hashable:
    """Return a value that is equal for inputs of one shape. Where a shape may hide it is equal to no other."""
    if isinstance(given, Tensor):
        return tuple(given.shape), given.dtype
    if isinstance(given, (tuple, list)):
        return type(given), tuple(map(_shape_of, given))
    if isinstance(given, dict):
        return tuple((key, _shape_of(value)) for key, value in given.items())
    return (type(given), given) if isinstance(given, _PLAIN) else object()
