"""Multiplies groups of rows, each by a matrix of its own, in one launch.

The host knows how many rows each group has. torch's `grouped_mm` is one kernel on CUDA devices of compute capability 9
and 10, in bfloat16. Anywhere else on a GPU it copies the offsets to the host and waits for them, so there, and for
types or sizes that it does not take, a loop over the groups runs instead: it has their sizes already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from treadle.dist.streams import upload

_ALIGNED_BYTES = 16
_MOST_GROUPS = 1023
_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
_ON_GPU = (torch.bfloat16,)
_CAPABLE = (9, 10)


class RowGroups:
    """Rows in groups, one after the other: `sizes[g]` of each, which may be 0."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._ends: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of all groups."""
        return sum(self.sizes)

    def ends(self, device: torch.device) -> Tensor:
        """Returns where each group ends, on the device. All products of these groups share the tensor."""
        if self._ends is None:
            self._ends = upload(list(accumulate(self.sizes)), torch.int32, device)
        return self._ends


def grouped_mm(rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """Returns `rows[group g] @ matrices[g]` for all groups, in the order of the rows."""
    if groups.num_rows == 0:
        return rows.new_zeros(0, matrices.shape[-1])
    if rows.is_meta:
        return rows.new_empty(groups.num_rows, matrices.shape[-1])  # the memory of one kernel, not of a loop's parts
    rows = rows.contiguous()
    if _takes(groups, rows, matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=groups.ends(rows.device))
    return torch.cat([part @ matrices[g] for g, part in enumerate(torch.split(rows, groups.sizes))])


def grouped_outer(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    """Returns `left[group g].T @ right[group g]` for each group: zeros where a group has no rows."""
    if groups.num_rows == 0:
        return left.new_zeros(len(groups.sizes), left.shape[1], right.shape[1])
    if left.is_meta:
        return left.new_empty(len(groups.sizes), left.shape[1], right.shape[1])
    left, right = left.contiguous(), right.contiguous()
    if _takes(groups, left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=groups.ends(left.device))
    pairs = zip(torch.split(left, groups.sizes), torch.split(right, groups.sizes), strict=True)
    return torch.stack([a.t() @ b for a, b in pairs])


def _takes(groups: RowGroups, *operands: Tensor) -> bool:
    """Returns whether torch's kernel takes these operands without the host waiting for the device."""
    device, dtype = operands[0].device, operands[0].dtype
    return (
        dtype in _types(device)
        and 0 < len(groups.sizes) <= _MOST_GROUPS
        and all(operand.dtype is dtype and _aligned(operand) for operand in operands)
    )


def _aligned(operand: Tensor) -> bool:
    """Returns whether both sides of each matrix, and where it begins, are multiples of 16 bytes."""
    sides = operand.shape[1:]  # the number of rows, or of matrices, may be any
    even = not any(side * operand.element_size() % _ALIGNED_BYTES for side in sides)
    return even and (operand.device.type == "cpu" or operand.data_ptr() % _ALIGNED_BYTES == 0)


@lru_cache
def _types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the types of which torch multiplies groups on a device in one launch, and without a wait."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return ()
    if device.type == "cpu":
        return _ON_CPU
    if device.type != "cuda" or torch.version.hip is not None:
        return ()
    major = torch.get_device_module(device).get_device_properties(device).major
    return _ON_GPU if major in _CAPABLE else ()
