"""Where new weights come from: `WeightSource` is the interface, `Source` the one for tensors in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from treadle.update.protocol.update_messages import WeightLayout
from treadle.weights import layouts
from treadle.weights.collecting import uncollected
from treadle.weights.layouts import from_mesh
from treadle.weights.tensor_boxes import ITEMSIZE, Box, Holding, Piece, Tensor


class WeightSource(Protocol):
    """One rank's part of the new weights, which an update asks for piece by piece.

    Order of calls, in each `Updater.update` or `recover`: `has` once, before anything moves; then `local` for the
    pieces of this rank's buckets, in the order of the plan's buckets. Elements may therefore be made when they are
    asked for: `local` of a piece is needed only until the next call of the same thread.
    A piece may be asked for again, by the comparison of sources, and of names that engines have tied: where a source
    has such a name, its pieces and those of the tensor it is tied to are asked for first. The thread that packs and the
    thread that compares may call at the same time. All calls for a piece must return the same elements until the update
    returns or raises. On a device each of these threads reads `local` on its current stream, on which elements made on
    demand are made.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Whole tensors by name, with the shape and dtype that all ranks and workers know."""
        ...

    @property
    def has(self) -> WeightLayout:
        """The pieces that this rank has. A tensor without elements is listed without a piece."""
        ...

    def local(self, piece: Piece) -> torch.Tensor:
        """Return the elements of a piece that lies within one of `has`, of the piece's shape and the tensor's dtype."""
        ...


@dataclass(frozen=True)
class Source:
    """A `WeightSource` of tensors in memory. They must not change until the update returns or raises.

    `tensors` are whole tensors by name, `held` the elements of each piece that this rank has.
    """

    tensors: Mapping[str, Tensor]
    held: Mapping[Piece, torch.Tensor]

    def __post_init__(self) -> None:
        for piece, local in self.held.items():
            box = piece.box
            fits = local.shape == (box.shape if any(box.start) else box.stop)
            if not fits or dtype_name(local) != self.tensors[piece.tensor].dtype:
                raise ValueError(
                    f"{piece.tensor} {box} of {self.tensors[piece.tensor].dtype} is held as "
                    f"{tuple(local.shape)} of {dtype_name(local)}"
                )

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], holding: Holding | None = None, rank: int = 0) -> Source:
        """Make a source of a state dict of plain tensors, of DTensors (FSDP2 and other meshes), or of both.

        A plain tensor is whole, or with a `holding` the box that the holding gives this rank. A rank that has several
        boxes of one tensor makes `Source(tensors, held)` instead.
        """
        with uncollected():
            return cls(*_described(state, holding, rank))

    @property
    def has(self) -> WeightLayout:
        """The pieces held here, and tensors without elements, which no rank holds."""
        here = {piece.tensor for piece in self.held}
        told = (tensor for tensor in self.tensors.values() if tensor.name in here or not tensor.size_bytes)
        return WeightLayout(tuple(told), tuple(self.held))

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        named: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        with uncollected():
            for piece, tensor in self.held.items():
                named.setdefault(piece.tensor, []).append((piece.box, tensor))
        return named

    def local(self, piece: Piece) -> torch.Tensor:
        """A view of the elements of a piece that lies within one of this rank's."""
        for box, tensor in self._by_name.get(piece.tensor, ()):
            if box == piece.box:
                return tensor
            if box.meet(piece.box) == piece.box:
                return tensor[piece.box.slices(box)]
        raise ValueError(f"{piece.tensor} {piece.box} is not held here")


def _described(
    state: Mapping[str, torch.Tensor], holding: Holding | None, rank: int
) -> tuple[dict[str, Tensor], dict[Piece, torch.Tensor]]:
    """The whole tensors of a state dict, and the pieces of them that it has."""
    tensors = dict(holding.tensors) if holding is not None else {}
    full: dict[str, torch.Tensor] = {}
    held: dict[Piece, torch.Tensor] = {}
    meshes: dict[DeviceMesh, dict[str, DTensor]] = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            meshes.setdefault(value.device_mesh, {})[name] = value
            tensors[name] = whole(name, value)
            continue
        plain = value.detach() if value.requires_grad else value
        if holding is None:
            tensors[name], piece = _whole(name, value.shape, dtype_name(value))
            if value.numel():
                held[piece] = plain
        elif value.numel():
            full[name] = plain
    if holding is not None:
        boxes = _boxes(holding, rank, full)
        held = {Piece(name, boxes[name]): value for name, value in full.items()}
    for mesh, values in meshes.items():
        held |= _of_mesh(mesh, values)
    return tensors, held


@lru_cache(maxsize=1 << 18)
def _whole(name: str, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, Piece]:
    """A tensor, and all of it as a piece. Kept: a trainer's next update describes the same ones."""
    shape = tuple(shape)
    return Tensor(name, shape, dtype), Piece(name, Box.whole(shape))


def _boxes(holding: Holding, rank: int, names: Collection[str]) -> dict[str, Box]:
    """The box that a rank holds of each named tensor. Raises ValueError where there is none, or more than one."""
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
    """Return the name, shape and dtype of a whole tensor."""
    return Tensor(name, tuple(tensor.shape), dtype_name(tensor))


def dtype_name(tensor: torch.Tensor) -> str:
    """A tensor's dtype by torch's name, without `torch.`."""
    name = _NAMES.get(tensor.dtype)
    return name if name is not None else str(tensor.dtype).removeprefix("torch.")


_NAMES = {getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)}


def _of_mesh(mesh: DeviceMesh, values: Mapping[str, DTensor]) -> dict[Piece, torch.Tensor]:
    """Return the shards that this rank has of the DTensors on one mesh."""
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
    """Mesh dimensions in the order in which they cut. Strided ones (FSDP2 over tensor parallelism) cut last."""
    strided = [isinstance(placement, _StridedShard) for placement in value.placements]
    return tuple(sorted(range(len(strided)), key=lambda at: (strided[at], at)))
