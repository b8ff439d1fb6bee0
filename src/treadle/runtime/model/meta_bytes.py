"""The bytes of a dry run: those that tensors of the meta device would take while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class OpBytes:
    """The memory of an op: at most `peak` bytes more while it runs than before, and `after` bytes more after it."""

    peak: int
    after: int


class MetaBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that ops make within its block, each from the op to its last reference.

    A storage that is known to be there `beforehand`, a parameter's, is not counted. An op's result is counted as a new
    storage if its memory is, so views cost nothing. What a kernel allocates and frees inside itself is not seen.
    """

    def __init__(self, beforehand: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._held = [tensor.untyped_storage() for tensor in beforehand]  # alive, so no other gets its address
        self._known = {storage._cdata for storage in self._held}

    def measure(self, run: Callable[[], None]) -> OpBytes:
        """Run an op; return its memory."""
        before = self.peak = self.live
        run()
        return OpBytes(self.peak - before, self.live - before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout is torch.strided:
                self._note(leaf.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._known or not size_bytes:
            return
        self._known.add(address)
        self.live += size_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, address, size_bytes)

    def _end(self, address: int, size_bytes: int) -> None:
        self._known.remove(address)
        self.live -= size_bytes
