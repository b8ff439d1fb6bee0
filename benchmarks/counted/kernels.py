"""Counts of torch's calls."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")


@functools.cache
def _is_kernel(func: Any) -> bool:
    """Return whether a call launches something: views and memory without values do not."""
    schema = func._schema
    if schema.name.partition("::")[2] in _NO_KERNEL:
        return False
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return writes or not any(result.alias_info is not None for result in schema.returns)


class CalledKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts aten calls by name: `calls` all of them, `kernels` those that launch something; and the tensors made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.num_tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call."""
        name = str(func).removeprefix("aten.").partition(".")[0]
        self.calls[name] += 1
        if _is_kernel(func):
            self.kernels[name] += 1
        made = func(*args, **(kwargs or {}))
        self.num_tensors += sum(isinstance(leaf, Tensor) for leaf in tree_leaves(made))
        return made


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of the storages that autograd saves in its block, each once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return sum(storage.nbytes() for storage in self._storages.values())
