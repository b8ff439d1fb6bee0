"""A box of a tensor that has reached a worker: staged in a buffer, with the digest that its source made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from treadle.update.memory.copying import copy, copy_hashed, digest
from treadle.weights.tensor_boxes import Box


@dataclass
class Arrival:
    """A box of tensor `name`: `tensor` has its elements, of the box's shape, on the host or on the buffers' device.

    `tensor` is valid until `load` returns: an engine that needs it longer copies it. `copy_into` makes the digest on
    the way. Where an adapter reads `tensor` by other means, the worker makes it after `load`, which costs another pass
    over the bytes.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    expected: bytes | None = None
    found: bytes | None = field(default=None, repr=False)

    def copy_into(self, target: torch.Tensor) -> None:
        """Copy bit by bit to a tensor of the box's shape, on any device; the first copy makes an expected digest."""
        own = self.tensor
        if target.shape != own.shape or target.element_size() != own.element_size():
            raise ValueError(
                f"{self.name} {self.box} has shape {tuple(own.shape)} and {own.element_size()} bytes an element, "
                f"the target {tuple(target.shape)} and {target.element_size()}"
            )
        if self.expected is None or self.found is not None:
            copy(target, own)
        else:
            self.found = copy_hashed(target, own)

    @property
    def wrong(self) -> bool:
        """True where the bytes differ from the source's."""
        if self.expected is None:
            return False
        if self.found is None:
            self.found = digest(self.tensor)
        return self.found != self.expected


class Assembly:
    """Puts pieces together from their parts, on the device of these, for engines that need whole ones."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, Box], tuple[Arrival, int]] = {}

    def add(self, part: Arrival, wanted: Box) -> Arrival | None:
        """Add a part; the wanted piece once it is complete, else None. A part that is all of it passes through."""
        if part.box == wanted:
            return part
        key = part.name, wanted
        if key not in self._parts:
            whole = Arrival(part.name, wanted, part.tensor.new_empty(wanted.shape))
            self._parts[key] = whole, wanted.num_elements
        whole, missing = self._parts[key]
        part.copy_into(whole.tensor[part.box.slices(wanted)])
        missing -= part.box.num_elements
        self._parts[key] = whole, missing
        if missing:
            return None
        return self._parts.pop(key)[0]

    @property
    def missing(self) -> list[str]:
        """Names of tensors with incomplete pieces."""
        return sorted({name for name, _ in self._parts})
