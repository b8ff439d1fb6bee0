"""The adapter of a dict of tensors: the simplest engine, and the example for an adapter of your own.

plain = Plain({"w": w}, tensors={"w": Tensor("w", (8, 4), "float32")}, boxes={"w": Box((0, 0), (4, 4))})
with Endpoint(plain, directory, worker=0):
    with plain.serving() as version:
        y = x @ plain.held["w"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import xxhash

from treadle.dist.streams import HOST_MEMORY
from treadle.update.memory.copying import digest
from treadle.update.memory.sharing import memory_fault
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.worker.arrived_boxes import Arrival, Leaving, copy_arrivals
from treadle.update.worker.gate import Gate
from treadle.weights.tensor_boxes import Box, Piece, Tensor


def digest_of(held: Mapping[str, torch.Tensor]) -> str:
    """A digest of all tensors and their names."""
    hashed = xxhash.xxh3_128()
    for name in sorted(held):
        hashed.update(name.encode() + digest(held[name]))
    return hashed.hexdigest()


class Plain:
    """Tensors behind a gate: `held[name]` is box `boxes[name]` of `tensors[name]`, or all of it without these.

    Each element has memory of its own. A tensor that is served under several names is held under one of them; `tied`
    has the others: `tied={"head": "embed"}`. A source that has both must have the same elements in both.
    """

    can_export = True
    whole = False

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        tensors: Mapping[str, Tensor] | None = None,
        boxes: Mapping[str, Box] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.held = dict(held)
        self._tied = tuple(tied.items()) if tied is not None else ()
        self.gate = Gate()
        self._boxes = dict(boxes) if boxes is not None else {n: Box.whole(tuple(t.shape)) for n, t in held.items()}
        if tensors is None:
            tensors = {n: Tensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in held.items()}
        self._tensors = {name: tensors[name] for name in self._boxes}
        for name, box in self._boxes.items():
            if tuple(self.held[name].shape) != box.shape:
                raise ValueError(f"{name} is held as {tuple(self.held[name].shape)}, its box {box} is {box.shape}")
            dtype = str(self.held[name].dtype).removeprefix("torch.")
            if dtype != self._tensors[name].dtype:
                raise ValueError(f"{name} is held as {dtype}, it is named as {self._tensors[name].dtype}; convert one")
        for name, taken in self._tied:
            if name in self._boxes or taken not in self._boxes:
                raise ValueError(
                    f"tied names tensors that are not held, and of each the one that is; got {name}: {taken}"
                )
        named = tuple(Piece(name, box) for name, box in self._boxes.items())
        self._layout = WeightLayout(tuple(self._tensors.values()), named, tied=self._tied)
        fault = memory_fault(self.held)
        if fault is not None:
            raise ValueError(fault)

    def serving(self) -> AbstractContextManager[int]:
        """Pass the gate with a request; yields the version of the tensors. Raises ClosedError."""
        return self.gate.serving()

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return next((held.device for held in self.held.values()), HOST_MEMORY)

    def layout(self) -> WeightLayout:
        """Return the boxes held."""
        return self._layout

    def close(self, how: str, deadline_s: float) -> str | None:
        """Close the gate and wait for the requests inside."""
        return self.gate.close(how, deadline_s)

    def begin(self) -> str | None:
        """Do nothing."""
        return None

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Copy into the tensors, in place."""
        return copy_arrivals(arrivals, self.held, self._boxes)

    def finish(self) -> str | None:
        """Do nothing: tensors are whole when they are loaded."""
        return None

    def invalidate(self) -> str | None:
        """Do nothing: there are no caches."""
        return None

    def lease(self, until_ns: int | None) -> str | None:
        """Have the gate look at the time."""
        self.gate.lease(until_ns)
        return None

    def open(self, version: int) -> str | None:
        """Open the gate."""
        self.gate.open(version)
        return None

    def abort(self) -> str | None:
        """Do nothing: only the tensors may be torn."""
        return None

    def export(self, leaving: Leaving) -> str | None:
        """Copy from the tensors held."""
        return leaving.copy_from(self.held, self._boxes)
