"""Tensors, boxes of them, and who holds which: the words in which a weight update is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import gt, sub

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes an element; names are torch's, without `torch.`."""


def is_text(name: str) -> bool:
    """True where a name can be sent: it has no surrogates."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a whole. Tensors of one `family` (a quantised weight and its scale) travel in one bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    family: str = ""

    def __post_init__(self) -> None:
        if not ((self.name + self.family).isascii() or (is_text(self.name) and is_text(self.family))):
            raise ValueError(f"a tensor's name is text without surrogates, got {self.name!r}; rename it")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"tensor {self.name} has dtype {self.dtype!r}; known are {', '.join(ITEMSIZE)}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"tensor {self.name} has shape {self.shape}; lengths are 0 or more")

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEMSIZE[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Box:
    """Half open in each dimension, and absolute: its corners are indices into the whole tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or min(self.start, default=0) < 0 or any(map(gt, self.start, self.stop)):
            raise ValueError(f"a box goes from 0 <= start to stop >= start in each dimension, got {self}")

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=False)) + "]"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its sides."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def num_elements(self) -> int:
        """0 where any side is empty, 1 where there are no dimensions."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Intersect two pieces; None if they have nothing in common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def slices(self, origin: Box) -> tuple[slice, ...]:
        """Index of the box in an array that holds `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin.start, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor."""

    tensor: str
    box: Box


@dataclass(frozen=True)
class Holding:
    """`pieces[rank]`: what each update rank has, or what each inference worker wants.

    Ranks that hold the same may share one tuple; planning is then done once for all of them. `workers` are the numbers
    that error messages give, where they are not the places in `pieces`.
    """

    tensors: dict[str, Tensor]
    pieces: tuple[tuple[Piece, ...], ...]
    workers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, pieces in _distinct(self.pieces):
            for piece in pieces:
                tensor = self.tensors.get(piece.tensor)
                if tensor is None:
                    raise ValueError(f"rank {rank} holds {piece.tensor} {piece.box}, a tensor that is not in `tensors`")
                box = piece.box
                if len(box.stop) != len(tensor.shape) or any(map(int.__gt__, box.stop, tensor.shape)):
                    raise ValueError(f"rank {rank} holds {piece.tensor} {box}, outside of its shape {tensor.shape}")


def _distinct(pieces: tuple[tuple[Piece, ...], ...]) -> list[tuple[int, tuple[Piece, ...]]]:
    """The first rank of each tuple that ranks share."""
    first: dict[int, tuple[int, tuple[Piece, ...]]] = {}
    for rank, held in enumerate(pieces):
        first.setdefault(id(held), (rank, held))
    return list(first.values())
