"""Counts the memory that tensors of the meta device would take, while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treadle.runtime.model.saved import SavedTensors
from treadle.runtime.model.saved.saved_store import InPlace, Key
from treadle.runtime.model.weight_grad import WeightGrad


class MetaBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that ops make within its block, each from the op to its last reference.

    A storage that is known to be there `beforehand`, a parameter's, is not counted. An op's result is counted as a new
    storage if its memory is, so views cost nothing. What a kernel allocates and frees inside itself is not seen.
    """

    def __init__(self, beforehand: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._serials: dict[int, int] = {}
        self._next = 0
        self._held = [tensor.untyped_storage() for tensor in beforehand]  # alive, so no other gets its address
        self._beforehand = {storage._cdata for storage in self._held}

    def begin(self) -> int:
        """Start a new peak; return the bytes alive."""
        self.peak = self.live
        return self.live

    def serial(self, tensor: Tensor) -> int | None:
        """Return a number that no other storage ever has; None for a storage that is not counted."""
        return self._serials.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout is torch.strided:
                self._note(leaf.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._beforehand or address in self._serials or not size_bytes:
            return
        self._serials[address], self._next = self._next, self._next + 1
        self.live += size_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, address, size_bytes)

    def _end(self, address: int, size_bytes: int) -> None:
        del self._serials[address]
        self.live -= size_bytes


class MetaSavedTensors(SavedTensors):
    """Counts what the first micro-batch of a stage saves, as `SavedTensors` does, which leaves meta tensors alone.

    `sizes[layer, part]` are the bytes of storages, each counted with the first part of its layer that saves it.
    """

    def __init__(self, memory: MetaBytes) -> None:
        super().__init__([], None)
        self.memory = memory
        self.sizes: dict[tuple[int, str], int] = {}
        self._known: set[tuple[int, int]] = set()
        self._in_halves = 0

    @property
    def kept(self) -> float:
        """What deferred weight gradients hold, as a part of what is saved; at most 1."""
        saved = sum(self.sizes.values())
        return min(1.0, self._in_halves / saved) if saved else 0.0

    def saving(self, key: Key, part: str) -> AbstractContextManager[Any]:
        """Count what autograd saves while a part runs."""

        def pack(tensor: Tensor) -> Tensor:
            self._count(key, part, tensor)
            return tensor.detach()  # the very tensor would be a cycle where its node never runs

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def keeping(self, key: Key, part: str) -> Callable[[Tensor], Any]:
        """Count the inputs of what is recomputed."""

        def keep(tensor: Tensor) -> InPlace:
            self._count(key, part, tensor)
            return InPlace(tensor)

        return keep

    def hold_halves(self, key: Key, part: str, halves: list[WeightGrad]) -> None:
        """Count what deferred weight gradients hold."""
        held = {self.memory.serial(t): t.untyped_storage().nbytes() for half in halves for t in (half.x, half.grad)}
        self._in_halves += sum(held.values()) if key[1] == 0 else 0

    def drop_halves(self, key: Key, part: str) -> None:
        """Leave it: `MetaBytes` sees what is freed."""

    def _count(self, key: Key, part: str, tensor: Tensor) -> None:
        _, mb, layer = key
        serial = self.memory.serial(tensor)
        if mb or serial is None:
            return
        size = tensor.untyped_storage().nbytes() if (layer, serial) not in self._known else 0
        self._known.add((layer, serial))
        self.sizes[layer, part] = self.sizes.get((layer, part), 0) + size


class FlashAttention(TorchFunctionMode):
    """Attention on the meta device as a CPU runs it: by its flash kernel.

    torch's own choice for meta tensors is the plain formula, which saves the matrix of all pairs of tokens several
    times. The kernel saves queries, keys, values, the output, a float32 number a row, and the mask in their type.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace attention and leave all else."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # the kernel finds out by itself
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    made: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return made
