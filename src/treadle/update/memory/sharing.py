"""Finds elements that share memory: what is loaded into one tensor would overwrite another."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_MOST_WORK = 1_000_000
"""Steps that a comparison of two interleaved tensors may take; views of one tensor by slices take a few."""


def memory_fault(held: Mapping[str, torch.Tensor]) -> str | None:
    """What keeps tensors from being loaded each on its own: no memory, or shared memory. None where nothing does."""
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in held.items():
        if tensor.is_meta:
            return f"{name} is on the meta device, where there are no elements; give the engine tensors with memory"
        if not tensor.numel():
            continue
        if _repeats(tensor):
            shape, strides = tuple(tensor.shape), tensor.stride()
            return (
                f"{name} of shape {shape} and strides {strides} has elements that share memory, as an expanded tensor "
                "has; hold a copy of it (clone(memory_format=torch.contiguous_format))"
            )
        first = tensor.data_ptr()
        spans.append((str(tensor.device), first, first + _extent(tensor) * tensor.element_size(), name))
    near: list[tuple[str, int, int, str]] = []
    for span in sorted(spans):
        device, start, _, name = span
        near = [other for other in near if other[0] == device and other[2] > start]
        for *_, other in near:
            if _meet(held[other], held[name]):
                return (
                    f"{other} and {name} share memory, so that one overwrites the other; hold one of them, and if they "
                    f"are the same tensor name the other in tied={{{name!r}: {other!r}}}"
                )
        near.append(span)
    return None


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _repeats(tensor: torch.Tensor) -> bool:
    """True unless each dimension steps over all that the smaller ones reach, as in a tensor and all its slices."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose spans of memory overlap have an element in common."""
    try:
        return np.shares_memory(_outline(one), _outline(other), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _outline(tensor: torch.Tensor) -> Any:
    """An array at a tensor's place, of which nothing is read: it may be a device's memory."""
    size = tensor.element_size()
    place = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": f"|V{size}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=place))
