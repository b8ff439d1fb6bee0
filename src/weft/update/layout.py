"""From what all ranks said to plans, each made once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from weft.update.shares import Shares
from weft.update.wire.control import Layouts, Sides
from weft.update.wire.messages import Wants
from weft.weights.buffers import Memory
from weft.weights.pieces import Holding, Piece, Tensor
from weft.weights.plan import plan_update

MOST_PLANS = 4


def layout_digest(has: Wants, wants: Wants) -> str:
    """The same where nothing changed since the last update."""
    return hashlib.blake2b(msgspec.msgpack.encode((has, wants)), digest_size=16).hexdigest()


class Plans:
    """What is known of all ranks, and the plans made of it."""

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._sides: tuple[Sides, ...] = ()
        self._made: dict[tuple[object, ...], Shares] = {}

    def of(self, layouts: Layouts) -> Shares:
        """The plan of an attempt."""
        if layouts.sides:
            self._sides = layouts.sides
            self._made.clear()
        key = layouts.loads, layouts.holds, layouts.only
        if key not in self._made:
            while len(self._made) >= MOST_PLANS:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(layouts)
        return self._made[key]

    def _make(self, layouts: Layouts) -> Shares:
        if layouts.holds:
            have = _holding([side.wants for side in self._sides], layouts.holds)
        else:
            have = _holding([side.has for side in self._sides], range(len(self._sides)))
        want = _holding([side.wants for side in self._sides], layouts.loads)
        free = tuple(side.free_bytes for side in self._sides)
        memory = replace(self._memory, free_bytes=free) if self._memory is not None else Memory(free)
        plan = plan_update(have, want, memory, layouts.only)
        return Shares(replace(plan, num_h2d=0) if layouts.holds else plan)  # a worker gives into the IPC buffer


def _holding(sides: Sequence[Wants], of: Sequence[int]) -> Holding:
    tensors: dict[str, Tensor] = {}
    pieces: list[tuple[Piece, ...]] = []
    shared: dict[tuple[Piece, ...], tuple[Piece, ...]] = {}
    for rank, side in enumerate(sides):
        for tensor in side.tensors:
            if tensors.setdefault(tensor.name, tensor) != tensor:
                raise ValueError(f"{tensor.name} is {tensors[tensor.name]} on one rank and {tensor} on rank {rank}")
        held = side.pieces if rank in of else ()
        pieces.append(shared.setdefault(held, held))
    return Holding(tensors, tuple(pieces))
