"""From what all ranks said to plans, each made once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from weft.update.catalogue import Known, read_layouts
from weft.update.shares import Shares
from weft.update.wire.control import Layouts
from weft.update.wire.messages import Wants
from weft.weights.buffers import Memory
from weft.weights.pieces import Holding, Tensor
from weft.weights.plan import plan_update

MOST_PLANS = 4


class Plans:
    """What is known of all ranks, and the plans made of it."""

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._known = Known((), (), ())
        self._made: dict[tuple[object, ...], Shares] = {}

    def of(self, layouts: Layouts) -> Shares:
        """The plan of an attempt."""
        if layouts.catalogue is not None:
            self._known = read_layouts(layouts.catalogue)
            self._made.clear()
        key = layouts.loads, layouts.holds, layouts.only
        if key not in self._made:
            while len(self._made) >= MOST_PLANS:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(layouts)
        return self._made[key]

    def _make(self, layouts: Layouts) -> Shares:
        known = self._known
        everyone, free = range(len(known.has)), known.free_bytes
        have = _holding(known.wants, layouts.holds) if layouts.holds else _holding(known.has, everyone)
        want = _holding(known.wants, layouts.loads)
        memory = replace(self._memory, free_bytes=free) if self._memory is not None else Memory(free)
        plan = plan_update(have, want, memory, layouts.only)
        return Shares(replace(plan, num_h2d=0) if layouts.holds else plan)  # a worker gives into the IPC buffer


def _holding(sides: Sequence[Wants], of: Collection[int]) -> Holding:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for rank, side in enumerate(sides):
        for tensor in side.tensors if id(side) not in seen else ():
            if tensors.setdefault(tensor.name, tensor) != tensor:
                raise ValueError(f"{tensor.name} is {tensors[tensor.name]} on one rank and {tensor} on rank {rank}")
        seen.add(id(side))
    among = set(of)
    return Holding(tensors, tuple(side.pieces if rank in among else () for rank, side in enumerate(sides)))
