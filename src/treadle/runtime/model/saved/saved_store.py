"""Takes the tensors that autograd saves, to count them and to offload them between forward and backward.

Each storage is kept once for a (chunk, micro-batch, layer); autograd holds only handles, which are views of it. The
input of each linear comes the same way, so the inputs of deferred weight gradients are offloaded too until their
backward. Parameters, buffers and the batch are never packed: they stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from treadle.dist.streams import keep
from treadle.ir.ops import BLOCK_FORWARD, RECOMPUTE, OpKind
from treadle.runtime.model.saved.live_saved import LiveBytes
from treadle.runtime.model.saved.pool import Pool
from treadle.runtime.model.weight_grad import WeightGrad

_APART = {**{str(kind.part): kind for kind in BLOCK_FORWARD.values()}, **{kind.cost_key: kind for kind in RECOMPUTE}}

Key: TypeAlias = tuple[int, int, int]
"""(stage, mb, layer)."""


@dataclass(frozen=True)
class SavedReport:
    """The bytes that a step saved on this rank.

    `peak`: the most alive at once, with those of deferred weight gradients. `parts`: the mean that a forward saved, by
    part of a layer; attn_r and mlp_r are what computing a part again saved besides. `kept`: the inputs and output
    gradients of linears that deferred weight gradients held after the backward, as a fraction of what the part saved.
    `moved`: the bytes copied to the host. `pool`: the size of the host's pool.
    """

    peak: int
    parts: dict[str, int]
    kept: float
    moved: int
    pool: int

    @property
    def by_kind(self) -> dict[OpKind, int]:
        """As the simulator counts it (`Layout.saved`): what exchanges save belongs to the computation before them."""
        attn, mlp = (
            sum(self.parts.get(name, 0) for name in names)
            for names in (("attn", "counts", "host", "dispatch"), ("mlp", "combine"))
        )
        apart = {kind: self.parts[name] for name, kind in _APART.items() if name in self.parts}
        return {OpKind.ATTN_F: attn, OpKind.MLP_F: mlp, **apart}


class Saved:
    """One storage that autograd saved: on the device, or in a block of the pool."""

    __slots__ = ("__weakref__", "_address", "_live", "_pool", "_version", "device", "room", "size_bytes", "tensor")

    def __init__(self, tensor: Tensor, live: LiveBytes) -> None:
        self.size_bytes, self.device = tensor.untyped_storage().nbytes(), tensor.device
        self.tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self.room: Tensor | None = None
        self._pool: Pool | None = None
        self._live = live
        self._address = live.hold(tensor)

    def present(self) -> Tensor:
        """Returns a tensor of the storage, which is on the device."""
        assert self.tensor is not None, "the verifier has seen that an onload comes before every reader"
        if self.tensor._version != self._version:
            raise _changed(self.tensor, self._version)
        keep(self.tensor)
        return self.tensor

    def leave(self, pool: Pool) -> None:
        """Copies the bytes into the pool, and frees them on the device."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.present().untyped_storage())
        self.room, self._pool = pool.take(self.size_bytes), pool
        self.room[: self.size_bytes].copy_(flat, non_blocking=True)
        self._live.release(self._address, self.size_bytes)
        self.tensor = None

    def come_back(self) -> None:
        """Copies the bytes back into a new storage on the device."""
        assert self.room is not None
        assert self._pool is not None
        flat = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        flat.copy_(self.room[: self.size_bytes], non_blocking=True)
        self._pool.give_back(self.room)
        self.room, self.tensor, self._version = None, flat, flat._version
        self._address = self._live.hold(flat)

    def __del__(self) -> None:
        if self.tensor is not None:
            self._live.release(self._address, self.size_bytes)
        elif self.room is not None and self._pool is not None:
            self._pool.give_back(self.room)


@dataclass(frozen=True)
class Handle:
    """A saved tensor as a view of its storage."""

    saved: Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Returns the tensor as it was saved. Raises RuntimeError if it was changed in place since."""
        tensor = self.saved.present()
        if tensor.dtype is self.dtype:
            return tensor.as_strided(self.size, self.stride, self.offset)  # knows when it is written to later
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.device)
        return empty.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)


class InPlace:
    """A tensor that stays where it is: nothing counts or moves it.

    It is detached: the very tensor that autograd saves would be a cycle where its node never runs.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        """Returns the tensor. Raises RuntimeError if it was changed in place since."""
        if self._tensor._version != self._version:
            raise _changed(self._tensor, self._version)
        return self._tensor


class Shelf:
    """The storages that one layer of one micro-batch saved. Handles keep them alive; the shelf only finds them."""

    def __init__(self) -> None:
        self._by_address: dict[int, weakref.ref[Saved]] = {}
        self._all: list[weakref.ref[Saved]] = []

    def place(self, tensor: Tensor, live: LiveBytes) -> tuple[Saved, bool]:
        """Returns the entry of a tensor's storage, and whether it is new."""
        address = tensor.untyped_storage()._cdata
        known = self._by_address.get(address)
        saved = known() if known is not None else None
        if saved is not None:
            return saved, False
        saved = Saved(tensor, live)
        self._by_address[address] = weakref.ref(saved)
        self._all.append(weakref.ref(saved))
        return saved, True

    def come_back(self) -> None:
        """Copies the storages back, and knows them by their new addresses: a layer may be computed again."""
        self._by_address = {}
        for saved in self.alive():
            saved.come_back()
            assert saved.tensor is not None
            self._by_address[saved.tensor.untyped_storage()._cdata] = weakref.ref(saved)

    def alive(self) -> list[Saved]:
        """Returns the storages that backward has not released yet."""
        return [saved for saved in (known() for known in self._all) if saved is not None]


class SavedTensors:
    """The saved tensors of a rank's layers. With a pool they can be offloaded; without one they are only counted."""

    def __init__(self, modules: Iterable[nn.Module], pool: Pool | None) -> None:
        self.pool, self.live = pool, LiveBytes()
        self._modules = tuple(modules)
        self._own: frozenset[int] = frozenset()
        self._shelves: dict[Key, Shelf] = {}
        self._halves: dict[tuple[Key, str], list[tuple[int, int]]] = {}
        self.sizes: dict[tuple[Key, str], int] = {}
        """The bytes that each part saved, each storage with the first part of its layer that saves it."""

        self._kept = self._moved = 0

    def begin(self, given: Iterable[Any] = ()) -> None:
        """Begins a step: drops the leftovers of a failed one, and notes where the parameters are.

        The caller keeps `given` tensors, a batch, alive; micro-batches are views of all of it, so they are not counted.
        """
        held = [t for module in self._modules for t in (*module.parameters(), *module.buffers())]
        held += [t for t in tree_leaves(list(given)) if isinstance(t, Tensor)]
        self._own = frozenset(t.untyped_storage()._cdata for t in held if _has_storage(t))
        for key in list(self._halves):
            self.drop_halves(*key)
        self._shelves.clear()
        self.sizes = {}
        self._kept = self._moved = 0
        self.live.begin()

    # -- a forward ---------------------------------------------------------------------------------------------------

    def saving(self, key: Key, part: str) -> AbstractContextManager[Any]:
        """Takes what a part of a layer saves while it runs forward."""
        shelf = self._shelf(key, part)

        def pack(tensor: Tensor) -> Any:
            if self._stays(tensor):
                return InPlace(tensor)
            return self._place(shelf, (key, part), tensor)

        return saved_tensors_hooks(pack, _unpack)

    def keeping(self, key: Key, part: str) -> Callable[[Tensor], Handle | InPlace]:
        """Returns what takes the inputs of a part of a layer that is computed again."""
        shelf = self._shelf(key, part)
        return lambda tensor: InPlace(tensor) if self._stays(tensor) else self._place(shelf, (key, part), tensor)

    def _shelf(self, key: Key, part: str) -> Shelf:
        self.sizes.setdefault((key, part), 0)
        return self._shelves.setdefault(key, Shelf())

    def _stays(self, tensor: Tensor) -> bool:
        return not _has_storage(tensor) or tensor.untyped_storage()._cdata in self._own

    def _place(self, shelf: Shelf, by: tuple[Key, str], tensor: Tensor) -> Handle:
        saved, is_new = shelf.place(tensor, self.live)
        if is_new:
            self.sizes[by] += saved.size_bytes
        return Handle(saved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    # -- between -----------------------------------------------------------------------------------------------------

    def offload(self, key: Key) -> None:
        """Copies the storages of a layer to the host."""
        assert self.pool is not None
        for saved in self._shelves[key].alive():
            saved.leave(self.pool)
            self._moved += saved.size_bytes

    def onload(self, key: Key) -> None:
        """Copies them back."""
        self._shelves[key].come_back()

    # -- weight halves -----------------------------------------------------------------------------------------------

    def hold_halves(self, key: Key, part: str, halves: list[WeightGrad]) -> None:
        """Counts the tensors that deferred weight gradients keep until they run."""
        held = [(self.live.hold(t), t.untyped_storage().nbytes()) for half in halves for t in (half.x, half.grad)]
        self._halves[key, part] = held
        self._kept += sum(
            {half.x.untyped_storage()._cdata: half.x.untyped_storage().nbytes() for half in halves}.values()
        )

    def drop_halves(self, key: Key, part: str) -> None:
        """Releases them after they have run."""
        for address, size_bytes in self._halves.pop((key, part)):
            self.live.release(address, size_bytes)

    # -- what it came to ---------------------------------------------------------------------------------------------

    def report(self) -> SavedReport:
        """Returns the report of the last step."""
        total, by_part = sum(self.sizes.values()), dict[str, list[int]]()
        for (_, part), size in self.sizes.items():
            by_part.setdefault(part, []).append(size)
        return SavedReport(
            peak=self.live.peak_bytes,
            parts={part: round(sum(sizes) / len(sizes)) for part, sizes in by_part.items() if any(sizes)},
            kept=self._kept / total if total else 0.0,
            moved=self._moved,
            pool=self.pool.size_bytes if self.pool is not None else 0,
        )


def _changed(tensor: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "a tensor that backward needs was changed in place after it was saved "
        f"(shape {tuple(tensor.shape)}, version {tensor._version}, saved at {version})"
    )


def _unpack(packed: Handle | InPlace) -> Tensor:
    return packed.tensor()


def _has_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor has plain memory: it is not sparse, wrapped or empty."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.untyped_storage().nbytes() > 0
