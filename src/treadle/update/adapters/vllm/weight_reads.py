"""Which elements an engine reads of the tensors that it is given: its loaders cut those of a checkpoint for their rank.

A dispatch mode of torch sees every op that the loaders run. One that makes a view reads nothing; any other one reads
the elements of the views that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.weights.tensor_boxes import Box


class WeightReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes reads of the given tensors while it is entered. `boxes` has for each tensor a box around all of them.

    It has those of all reloads so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.boxes: dict[str, Box] = {}
        self.outside = ""
        """The first read in this reload of elements that were not there, for people."""
        self._given: dict[int, tuple[StorageWeakRef, str, tuple[int, ...], Box]] = {}

    def begin(self) -> None:
        """A reload begins."""
        self._given.clear()
        self.outside = ""

    def give(self, name: str, tensor: torch.Tensor, filled: Box) -> None:
        """Note reads of a tensor in C order, of which this box has elements."""
        storage = tensor.untyped_storage()
        # The weak reference keeps the storage's record, and with it the key, from being used again.
        held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._given[storage._cdata] = held, name, tuple(tensor.shape), filled

    def keep_whole(self) -> None:
        """Count the tensors that are still in use as read whole: later reads of them are not seen."""
        for reference, name, shape, filled in self._given.values():
            if not reference.expired():  # type: ignore[no-untyped-call]
                self._note(name, Box.whole(shape), filled)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not getattr(func, "is_view", False):
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                known = self._given.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
                if known is not None and tensor.numel():
                    _, name, shape, filled = known
                    self._note(name, box_around(tensor, shape), filled)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, box: Box, filled: Box) -> None:
        if not self.outside and filled.meet(box) != box:
            self.outside = f"{name} {box}, of which {filled} came"
        before = self.boxes.get(name, box)
        start, stop = map(min, before.start, box.start), map(max, before.stop, box.stop)
        self.boxes[name] = Box(tuple(start), tuple(stop))


def box_around(view: torch.Tensor, shape: tuple[int, ...]) -> Box:
    """Return a box around the elements of a view of a tensor of that shape in C order: no larger, if it is a box."""
    first, strides = int(view.storage_offset()), _strides(shape)
    start = _place(first, strides)
    reach = [0] * len(shape)
    for length, stride in zip(view.shape, view.stride(), strict=True):
        at = next((i for i, own in enumerate(strides) if shape[i] > 1 and own <= stride), None)
        if length == 1 or stride == 0 or at is None:
            continue
        if stride % strides[at]:
            break
        reach[at] += stride // strides[at] * (length - 1)
    else:
        stop = tuple(a + r + 1 for a, r in zip(start, reach, strict=True))
        if all(end <= length for end, length in zip(stop, shape, strict=True)):
            return Box(start, stop)
    # A dimension of the view goes over the end of one of the tensor: all from its first element to its last.
    span = sum(stride * (length - 1) for length, stride in zip(view.shape, view.stride(), strict=True))
    last = _place(first + span, strides)
    same = next((i for i, (a, b) in enumerate(zip(start, last, strict=True)) if a != b), len(shape))
    inner = len(shape) - same - 1
    return Box((*start[: same + 1], *(0,) * inner), (*(end + 1 for end in last[: same + 1]), *shape[same + 1 :]))


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, stride = list[int](), 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return strides[::-1]


def _place(offset: int, strides: list[int]) -> tuple[int, ...]:
    """Return the indices of an element."""
    place = []
    for stride in strides:
        place.append(offset // stride)
        offset %= stride
    return tuple(place)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
