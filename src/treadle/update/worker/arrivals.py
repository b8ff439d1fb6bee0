"""A box of a tensor that has reached a worker: staged in a buffer, with the digest that its source made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from treadle.update.memory.copying import Array, copy, copy_hashed, digest, meaning, opaque
from treadle.weights.pieces import Box


@dataclass
class Arrival:
    """A box of tensor `name`. `staged` is valid until `load` returns: an engine that needs it longer copies it.

    `copy_into` makes the digest on the way. Where an adapter reads `staged` by other means, the worker makes it after
    `load`, which costs another pass over the bytes.
    """

    name: str
    box: Box
    dtype: str
    staged: Array
    expected: bytes | None = None
    found: bytes | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """The staged elements as a torch tensor of the box's shape: the same memory."""
        return meaning(self.staged, self.dtype)

    def copy_into(self, target: torch.Tensor | Array) -> None:
        """Copy to a tensor of the box's shape, and make the digest where one is expected."""
        if isinstance(target, torch.Tensor):
            if target.device.type != "cpu":
                target.copy_(self.tensor)
                return
            target = opaque(target)
        if target.shape != self.staged.shape or target.itemsize != self.staged.itemsize:
            raise ValueError(
                f"{self.name} {self.box} has shape {self.staged.shape} and {self.staged.itemsize} bytes an element, "
                f"the target {target.shape} and {target.itemsize}"
            )
        if self.expected is None:
            copy(target, self.staged)
        else:
            self.found = copy_hashed(target, self.staged)

    @property
    def wrong(self) -> bool:
        """True where the bytes differ from the source's."""
        if self.expected is None:
            return False
        if self.found is None:
            self.found = digest(self.staged)
        return self.found != self.expected


class Assembly:
    """Puts pieces together from their parts, for engines that need whole ones."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, Box], tuple[Arrival, int]] = {}

    def add(self, part: Arrival, wanted: Box) -> Arrival | None:
        """Add a part; the wanted piece once it is complete, else None. A part that is all of it passes through."""
        if part.box == wanted:
            return part
        key = part.name, wanted
        if key not in self._parts:
            whole = Arrival(part.name, wanted, part.dtype, np.empty(wanted.shape, part.staged.dtype))
            self._parts[key] = whole, wanted.num_elements
        whole, missing = self._parts[key]
        part.copy_into(whole.staged[part.box.slices(wanted)])
        missing -= part.box.num_elements
        self._parts[key] = whole, missing
        if missing:
            return None
        return self._parts.pop(key)[0]

    @property
    def missing(self) -> list[str]:
        """Names of tensors with incomplete pieces."""
        return sorted({name for name, _ in self._parts})
