"""What reaches a worker: a box of a tensor, staged in a buffer, with the digest its source made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from treadle.update.memory.copying import Array, copy, copy_hashed, digest, meaning, opaque
from treadle.weights.pieces import Box


@dataclass
class Arrival:
    """`staged` is valid until `load` returns: whoever keeps it copies it.

    `copy_into` checks on the way. An arrival that an adapter reads otherwise is checked by the engine after `load`,
    which costs another pass.
    """

    name: str
    box: Box
    dtype: str
    staged: Array
    expected: bytes | None = None
    found: bytes | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """The staged elements with their meaning; shape is the box's."""
        return meaning(self.staged, self.dtype)

    def copy_into(self, target: torch.Tensor | Array) -> None:
        """Copies to a tensor of the box's shape, and hashes where a digest is expected."""
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
        """Do the bytes differ from those of the source."""
        if self.expected is None:
            return False
        if self.found is None:
            self.found = digest(self.staged)
        return self.found != self.expected


class Assembly:
    """Pieces put together from their parts, for engines that want whole ones."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, Box], tuple[Arrival, int]] = {}

    def add(self, part: Arrival, wanted: Box) -> Arrival | None:
        """The wanted piece once all of it is there; a part that is all of it passes through."""
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
        """Names of what is there in part."""
        return sorted({name for name, _ in self._parts})
