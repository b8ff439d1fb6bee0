"""Tensors as checkpoints have them: a part of a whole tensor, which has one name whatever ranks hold of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from treadle.dist.streams import HOST_MEMORY, Download, streams_of


@dataclass(frozen=True)
class TensorPart:
    """The part that this rank has of a tensor of `shape`: from `offset` on, as far as `tensor` reaches.

    Parameters are whole. The state of a sharded optimizer is in runs of elements, parts of a tensor of one dimension.

    Example:
        >>> TensorPart.run(torch.zeros(3), first=2, size=10)
        TensorPart(tensor=tensor([0., 0., 0.]), offset=(2,), shape=(10,))

    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorPart:
        """Return all of a tensor."""
        return cls(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))

    @classmethod
    def run(cls, tensor: Tensor, first: int, size: int) -> TensorPart:
        """Return the elements from `first` on of a flat tensor of `size` elements."""
        return cls(tensor.detach(), (first,), (size,))

    def copied(self) -> TensorPart:
        """Return a copy in host memory, which no later step changes."""
        return TensorPart(self.tensor.to(HOST_MEMORY, copy=True), self.offset, self.shape)

    def leaving(self) -> TensorPart | LeavingPart:
        """Return a copy in host memory, or on its way there: a device copies it after what it has launched."""
        if streams_of(self.tensor.device) is None or not self.tensor.numel():
            return self.copied()
        return LeavingPart(Download(self.tensor), self.offset, self.shape)

    @property
    def size_bytes(self) -> int:
        """The bytes of the part."""
        return self.tensor.nbytes

    @property
    def form(self) -> str:
        """The whole tensor's shape and type, for messages."""
        return form_of(self.shape, self.tensor.dtype)


@dataclass(frozen=True)
class LeavingPart:
    """A part on its way to pinned memory."""

    copy: Download
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def arrived(self) -> TensorPart:
        """Wait for the device, and return the copy."""
        return TensorPart(self.copy.tensor(), self.offset, self.shape)


State: TypeAlias = dict[str, TensorPart]
"""A rank's parts by the tensors' names."""


def form_of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return a tensor's shape and type in words."""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
