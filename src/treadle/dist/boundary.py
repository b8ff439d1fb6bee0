"""The boundary between two stages: the tensors sent, with their shapes and dtypes.

Before a stage's first output a header is sent, so that its reader can allocate; from then on receives are posted
ahead. In a step whose micro-batches have different shapes a header goes ahead of each output. The header is numbers in
a tensor of fixed size, in the host's memory whatever the stages run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.dist.streams import HOST_MEMORY

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_TENSORS, _MOST_DIMS = 16, 8
_FIELDS = 3 + _MOST_DIMS
HEADER_SIZE = 1 + _MOST_TENSORS * _FIELDS
FLAGS_SIZE = 1 + _MOST_TENSORS


@dataclass(frozen=True)
class Spec:
    """One tensor's shape and dtype, and whether a gradient may come back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocates such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def size_bytes(self) -> int:
        """Bytes of one such tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}{'' if self.grad else ' without gradient'}"


Boundary = tuple[Spec, ...]

Flags = tuple[bool, ...]
"""For each output of a stage that may get a gradient: whether it does. Outputs that are not read get none."""


def boundary_of(tensors: Sequence[Tensor]) -> Boundary:
    """Return the specs of a stage's outputs."""
    return tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def fits(tensors: Sequence[Tensor], boundary: Boundary) -> bool:
    """Return whether the tensors have the boundary's shapes, dtypes and `requires_grad`."""
    if len(tensors) != len(boundary):
        return False
    for tensor, spec in zip(tensors, boundary, strict=True):
        if tensor.shape != spec.shape or tensor.dtype is not spec.dtype or tensor.requires_grad is not spec.grad:
            return False
    return True


def differ_in_shape(boundary: Boundary, other: Boundary) -> bool:
    """Return whether the two differ in nothing but shapes."""
    return [(spec.dtype, spec.grad) for spec in boundary] == [(spec.dtype, spec.grad) for spec in other]


def to_header(boundary: Boundary, stage: int) -> Tensor:
    """Return the boundary as numbers. Raises ValueError for what a header cannot hold."""
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=HOST_MEMORY)
    if len(boundary) > _MOST_TENSORS:
        raise ValueError(
            f"stage {stage} returns {len(boundary)} tensors; {_MOST_TENSORS} is the most that can be sent on"
        )
    header[0] = len(boundary)
    for number, spec in enumerate(boundary):
        if spec.dtype not in _DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise ValueError(f"stage {stage} returns {spec.dtype}, which cannot be sent; use one of {allowed}")
        if len(spec.shape) > _MOST_DIMS:
            raise ValueError(
                f"stage {stage} returns a tensor of {len(spec.shape)} dimensions; {_MOST_DIMS} is the most"
            )
        fields = [_DTYPES.index(spec.dtype), int(spec.grad), len(spec.shape), *spec.shape]
        header[1 + number * _FIELDS :][: len(fields)] = torch.tensor(fields, device=HOST_MEMORY)
    return header


def from_header(header: Tensor) -> Boundary:
    """Return the boundary that `to_header` wrote."""
    values = header.tolist()
    specs = []
    for number in range(values[0]):
        dtype, grad, dims, *shape = values[1 + number * _FIELDS :][:_FIELDS]
        specs.append(Spec(tuple(shape[:dims]), _DTYPES[dtype], bool(grad)))
    return tuple(specs)


def all_flags(boundary: Boundary) -> Flags:
    """Return the flags for gradients of every output that may have one."""
    return tuple(True for spec in boundary if spec.grad)


def to_flags(flags: Flags) -> Tensor:
    """Return the flags as numbers."""
    header = torch.zeros(FLAGS_SIZE, dtype=torch.int64, device=HOST_MEMORY)
    header[0] = len(flags)
    header[1 : 1 + len(flags)] = torch.tensor(flags, dtype=torch.int64, device=HOST_MEMORY)
    return header


def from_flags(header: Tensor) -> Flags:
    """Return the flags that `to_flags` wrote."""
    num, *flags = header.tolist()
    return tuple(map(bool, flags[:num]))
