"""Small models, their layouts, and weights that any process can make again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tests.support.devices import here
from treadle.update import Plain, Source
from treadle.update.memory.copying import digest, opaque
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Tensor

SMALL = Memory(1 << 20, target_bytes=1 << 16, least_bytes=1 << 14)


def model(layers: int, width: int, experts: int = 2) -> list[Tensor]:
    tensors = [Tensor("embed", (8 * width, width), "bfloat16")]
    for layer in range(layers):
        tensors.append(Tensor(f"layers.{layer}.norm", (width,), "bfloat16"))
        tensors.append(Tensor(f"layers.{layer}.up", (4 * width, width), "bfloat16"))
        tensors.append(Tensor(f"layers.{layer}.down", (width, 4 * width), "bfloat16"))
        for expert in range(experts):
            tensors.append(Tensor(f"layers.{layer}.experts.{expert}", (2 * width, width), "bfloat16"))
    return tensors


def stage(name: str, layers: int) -> int:
    return 0 if name == "embed" else int(name.split(".")[1]) * 2 // layers


def trained(tensors: list[Tensor], layers: int) -> Holding:
    """PP2 x EP2."""
    expert = lambda name: int(name.split(".")[3]) % 2 if "experts" in name else None  # noqa: E731
    return Parallel(pp=2, ep=2, stage=lambda name: stage(name, layers), expert=expert).holding(tensors)


def served(tensors: list[Tensor]) -> Holding:
    """TP4: up projections are cut along rows, down projections along columns, which are strided."""
    rule = lambda name: None if "norm" in name else (1 if "down" in name else 0)  # noqa: E731
    return Parallel(tp=4, dim=rule).holding(tensors)


def numbers(tensor: Tensor, box: Box, version: int) -> npt.NDArray[np.uint16]:
    """The elements of a box, the same in any process: by their place in the tensor, its name, and the version."""
    seed = xxhash.xxh32_intdigest(f"{tensor.name} {version}".encode())
    place = np.full((1,) * len(box.shape), seed, np.uint32)
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        stride = math.prod(tensor.shape[axis + 1 :])
        along = (np.arange(start, stop, dtype=np.uint64) * stride).astype(np.uint32)  # wraps around
        place = place + along.reshape([-1 if a == axis else 1 for a in range(len(box.shape))])
    return (place * np.uint32(2654435761) >> np.uint32(16)).astype(np.uint16)


def source_of(have: Holding, rank: int, version: int) -> Source:
    held = {}
    for piece in have.pieces[rank]:
        array = numbers(have.tensors[piece.tensor], piece.box, version)
        held[piece] = here(torch.from_numpy(array).view(torch.bfloat16))
    return Source(have.tensors, held)


def expected(want: Holding, worker: int, version: int) -> str:
    """The digest that a plain worker must have."""
    hashed = xxhash.xxh3_128()
    for piece in sorted(want.pieces[worker], key=lambda piece: piece.tensor):
        part = numbers(want.tensors[piece.tensor], piece.box, version)
        hashed.update(piece.tensor.encode() + digest(torch.from_numpy(part)))
    return hashed.hexdigest()


@dataclass(frozen=True)
class Compare:
    """Compares every element that a worker holds with its expected value, in its process; names tensors that differ."""

    version: int

    def __call__(self, adapter: Plain) -> list[str]:
        wrong = []
        tensors = {tensor.name: tensor for tensor in adapter.layout().tensors}
        for piece in adapter.layout().pieces:
            held = opaque(adapter.held[piece.tensor].cpu())
            if not np.array_equal(held, numbers(tensors[piece.tensor], piece.box, self.version)):
                wrong.append(piece.tensor)
        return wrong


@dataclass(frozen=True)
class SourceMaker:
    """Makes a rank's weights of a version."""

    have: Holding

    def __call__(self, rank: int, version: int) -> Source:
        return source_of(self.have, rank, version)
