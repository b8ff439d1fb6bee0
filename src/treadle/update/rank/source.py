"""Where new weights come from: this rank's pieces of tensors, in memory that stays put during an update."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from treadle.update.protocol.messages import Wants
from treadle.weights import layouts
from treadle.weights.layouts import from_mesh
from treadle.weights.pieces import Box, Holding, Piece, Tensor


@dataclass(frozen=True)
class Source:
    """One rank's part of the weights: whole tensors as they are known to all, and the boxes that lie here."""

    tensors: Mapping[str, Tensor]
    held: Mapping[Piece, torch.Tensor]

    def __post_init__(self) -> None:
        for piece, local in self.held.items():
            if tuple(local.shape) != piece.box.shape or dtype_name(local) != self.tensors[piece.tensor].dtype:
                raise ValueError(
                    f"{piece.tensor} {piece.box} of {self.tensors[piece.tensor].dtype} is held as "
                    f"{tuple(local.shape)} of {dtype_name(local)}"
                )

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], holding: Holding | None = None, rank: int = 0) -> Source:
        """A state dict of plain tensors, of DTensors (FSDP2 and other meshes), or of both.

        With a `holding`, plain tensors are this rank's pieces by it, one box a tensor; without, they are whole. Where a
        rank has several boxes of a tensor, say so with `Source` itself.
        """
        plain = {name: value for name, value in state.items() if not isinstance(value, DTensor)}
        tensors = dict(holding.tensors) if holding is not None else {name: whole(name, t) for name, t in plain.items()}
        full = {name: value.detach() for name, value in plain.items() if value.numel()}
        boxes = {name: Box.whole(tuple(value.shape)) for name, value in full.items()}
        if holding is not None:
            boxes = _boxes(holding, rank, full)
        held = {Piece(name, boxes[name]): value for name, value in full.items()}
        meshes: dict[DeviceMesh, dict[str, DTensor]] = {}
        for name, value in state.items():
            if isinstance(value, DTensor):
                tensors[name] = whole(name, value)
                meshes.setdefault(value.device_mesh, {})[name] = value
        for mesh, values in meshes.items():
            held |= _of_mesh(mesh, values)
        return cls(tensors, held)

    @property
    def has(self) -> Wants:
        """As it is told to others: what lies here, and what has no elements to lie anywhere."""
        here = {piece.tensor for piece in self.held}
        told = (tensor for tensor in self.tensors.values() if tensor.name in here or not tensor.size_bytes)
        return Wants(tuple(told), tuple(self.held))

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        named: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for piece, tensor in self.held.items():
            named.setdefault(piece.tensor, []).append((piece.box, tensor))
        return named

    def local(self, piece: Piece) -> torch.Tensor:
        """The elements of a piece that lies within one of this rank's."""
        for box, tensor in self._by_name.get(piece.tensor, ()):
            if box.meet(piece.box) == piece.box:
                return tensor[piece.box.slices(box)]
        raise ValueError(f"{piece.tensor} {piece.box} is not held here")

    def overlapping(self, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        """The parts of a piece that this rank has, and their elements."""
        for box, tensor in self._by_name.get(piece.tensor, ()):
            common = box.meet(piece.box)
            if common is not None:
                yield common, tensor[common.slices(box)]


def _boxes(holding: Holding, rank: int, names: Collection[str]) -> dict[str, Box]:
    """The box that a rank has of each tensor."""
    boxes: dict[str, Box] = {}
    for piece in holding.pieces[rank]:
        if piece.tensor in names and boxes.setdefault(piece.tensor, piece.box) != piece.box:
            raise ValueError(
                f"the holding gives rank {rank} {boxes[piece.tensor]} and {piece.box} of {piece.tensor}, and the state "
                "has one tensor of that name; make Source(tensors, held) with a tensor for each box"
            )
    for name in names:
        if name not in boxes:
            known = f"gives rank {rank} nothing of it" if name in holding.tensors else "does not know it"
            raise ValueError(f"the state has {name}, the holding {known}; leave it out, or add it to the holding")
    return boxes


def whole(name: str, tensor: torch.Tensor) -> Tensor:
    """A tensor as it is known to all."""
    return Tensor(name, tuple(tensor.shape), dtype_name(tensor))


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _of_mesh(mesh: DeviceMesh, values: Mapping[str, DTensor]) -> dict[Piece, torch.Tensor]:
    """The rank's shards of tensors on one mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return {}
    place = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + at
    held: dict[Piece, torch.Tensor] = {}
    by_order: dict[tuple[int, ...], list[str]] = {}
    for name, value in values.items():
        by_order.setdefault(_cutting_order(value), []).append(name)
    for order, names in by_order.items():
        rules = {name: _placements(values[name]) for name in names}
        holding = from_mesh((whole(n, values[n]) for n in names), mesh.shape, rules.__getitem__, order=order)
        held |= {piece: values[piece.tensor].to_local().detach() for piece in holding.pieces[place]}
    return held


def _placements(value: DTensor) -> tuple[layouts.Shard | layouts.Replicate, ...]:
    made: list[layouts.Shard | layouts.Replicate] = []
    for placement in value.placements:
        if isinstance(placement, Shard | _StridedShard):
            made.append(layouts.Shard(placement.dim))
        elif isinstance(placement, Replicate):
            made.append(layouts.REPLICATE)
        else:
            raise ValueError(f"a tensor placed {placement} cannot be sent; redistribute it to Shard or Replicate")
    return tuple(made)


def _cutting_order(value: DTensor) -> tuple[int, ...]:
    """Mesh dimensions in the order in which they cut: one that cuts strided (FSDP2 over tensor parallelism) is late."""
    strided = [isinstance(placement, _StridedShard) for placement in value.placements]
    return tuple(sorted(range(len(strided)), key=lambda at: (strided[at], at)))
