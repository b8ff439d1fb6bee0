"""Main gradients of parameters in one flat tensor, which ranks reduce whole or in shards.

Behind the elements comes a flag for each slot, whether some rank used it. Shards have a row for each rank, as long as
the longest, each with its own flags: one reduce-scatter brings a rank its elements and all flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treadle.dist.groups import Group
from treadle.dist.streams import Download, keep, upload

LOW = (torch.bfloat16, torch.float16)
"""Types of parameters whose main gradients are float32."""


class FlatRun(NamedTuple):
    """Elements `first` to below `last` of a flattened parameter, which are at `at` of row `row`."""

    first: int
    last: int
    row: int
    at: int


_WIDE_GEMMS = ("cuda",)
"""Types of devices on which `torch.addmm` with `out_dtype` multiplies two-byte types into float32: torch 2.13 registers
`addmm.dtype_out` for CUDA alone."""


class OuterProduct(NamedTuple):
    """A weight gradient, `left.T @ right`, that a GEMM may add to its main gradient."""

    left: Tensor
    right: Tensor

    def made(self) -> Tensor:
        """Return the gradient in the type of its factors."""
        return self.left.t() @ self.right

    def add_to(self, main: Tensor, *, filled: bool) -> bool:
        """Add it to a main gradient, or begin that, by one GEMM; returns whether this device has it."""
        low = self.left.dtype in LOW and main.dtype is torch.float32
        if not (main.device.type in _WIDE_GEMMS and low and main.dim() == 2):
            return False
        torch.addmm(main, self.left.t(), self.right, beta=int(filled), out_dtype=main.dtype, out=main)
        return True


@dataclass(frozen=True)
class GradientSlot:
    """The main gradient of a parameter, or of a part of it.

    Several parameters are objects of one tied parameter on this rank: they are one summand.
    """

    params: tuple[nn.Parameter, ...]
    runs: tuple[FlatRun, ...]

    @property
    def is_whole(self) -> bool:
        """True if it is the whole of its parameter, in one piece."""
        return len(self.runs) == 1 and self.runs[0][:2] == (0, self.params[0].numel())


Owned: TypeAlias = Sequence[tuple[tuple[nn.Parameter, ...], int, int]]
"""(the objects of a parameter, first, last) of the elements whose reduced gradients one rank gets, in order."""


class BucketState(NamedTuple):
    """What a bucket had before a step, for one that fails."""

    flat: Tensor | None
    filled: list[bool]
    reduced: bool


class GradientBucket:
    """The main gradients of some parameters, reduced over `group`; without one this rank alone holds them.

    With one row every rank gets the whole sum, in memory that each step makes anew, as `.grad` may show it. With a row
    for each rank of the group a rank gets its own, in memory that stays.
    """

    def __init__(self, rows: Sequence[Owned], group: Group | None) -> None:
        self.group, self.is_sharded = group, len(rows) > 1 or group is None
        assert not (group is not None and self.is_sharded) or len(rows) == len(group.ranks), "a row is a rank's"
        self.slots = _slots(rows)
        first = self.slots[0].params[0]
        self.dtype, self.device = main_dtype(first), first.device
        self.num_elements = max(sum(last - first for _, first, last in row) for row in rows)
        self.num_rows = len(rows)
        self.flat: Tensor | None = None
        self.filled = [False] * len(self.slots)
        """Whether a slot has a gradient: this rank's before the reduction, any rank's after it."""
        self.reduced = False
        self._views: list[list[Tensor]] = []
        self._works: list[dist.Work] = []
        self._arrived: Tensor | None = None
        self._used: Download | None = None
        self._is_complete = False
        self._held: Tensor | None = None
        self._held_filled: list[bool] = []

    @classmethod
    def whole(cls, params: Iterable[tuple[nn.Parameter, ...]], group: Group | None) -> GradientBucket:
        """Make a bucket of whole parameters, of which every rank gets the whole sum."""
        made = cls([[(objects, 0, objects[0].numel()) for objects in params]], group)
        made.is_sharded = False
        return made

    def number_of(self, param: Tensor) -> int:
        """Return the number of a parameter's slot."""
        return next(at for at, slot in enumerate(self.slots) if any(each is param for each in slot.params))

    # -- its memory --------------------------------------------------------------------------------------------------

    def _allocate(self) -> Tensor:
        if self.flat is None:
            row = self.num_elements + len(self.slots)
            make = torch.zeros if self.num_rows > 1 else torch.empty  # shorter rows end with elements of nobody
            self.flat = make(self.num_rows * row, dtype=self.dtype, device=self.device)
            self._views = self._all_views()
        return self.flat

    def _all_views(self) -> list[list[Tensor]]:
        return [[self._view(slot, run) for run in slot.runs] for slot in self.slots]

    def _view(self, slot: GradientSlot, run: FlatRun) -> Tensor:
        assert self.flat is not None
        row = self.flat.view(self.num_rows, -1)[run.row]
        view = row[run.at : run.at + run.last - run.first]
        return view.view(slot.params[0].shape) if slot.is_whole else view

    @property
    def row(self) -> int:
        """The row that this rank gets."""
        return self.group.group_rank if self.group is not None and self.is_sharded else 0

    def main(self, number: int) -> Tensor:
        """Return the main gradient of a whole slot, in the shape of its parameter."""
        (view,) = self._views[number]
        return view

    @property
    def shard(self) -> Tensor:
        """Return this rank's elements of the sum."""
        return self._allocate().view(self.num_rows, -1)[self.row][: self.num_elements]

    def _flags(self) -> Tensor:
        """Return the flags of all rows."""
        return self._allocate().view(self.num_rows, -1)[:, self.num_elements :]

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self) -> BucketState:
        """Begin a step; return what `restore` takes. A shard goes on from what it has, whole sums begin at nothing."""
        before = BucketState(self.flat, list(self.filled), self.reduced)
        self._held, self._is_complete = None, False
        if not self.is_sharded:
            self.flat = None
        elif not any(self.filled):
            before = BucketState(None, before.filled, before.reduced)
        elif self.reduced:
            self._held, self._held_filled = self.shard.clone(), before.filled
            before = BucketState(self._held, before.filled, before.reduced)
        else:
            assert self.flat is not None, "it is filled"
            return BucketState(self.flat.clone(), before.filled, before.reduced)
        self.filled = [False] * len(self.slots)
        self.reduced = False
        return before

    def add(self, number: int, grad: Tensor | OuterProduct) -> None:
        """Add a gradient to a slot."""
        if self._is_complete:
            raise ValueError(
                f"a parameter of shape {list(self.slots[number].params[0].shape)} got a gradient after the reduction "
                "that it belongs to: a layer reads it that does not have it among its modules; register it there, too"
            )
        self._allocate()
        slot, filled = self.slots[number], self.filled[number]
        self.filled[number] = True
        if isinstance(grad, OuterProduct):
            if slot.is_whole and grad.add_to(self.main(number), filled=filled):
                return
            grad = grad.made()
        dense = grad.to_dense() if grad.is_sparse else grad
        for view, run in zip(self._views[number], slot.runs, strict=True):
            part = dense if slot.is_whole else dense.reshape(-1)[run.first : run.last]
            if filled:
                view.add_(part)
            else:
                view.copy_(part)

    def complete(self) -> None:
        """Fill in what this rank has no gradient for, on the stream that reduces; the sums are final."""
        self._is_complete = True
        keep(self._allocate())
        for views, filled in zip(self._views, self.filled, strict=True):
            for view in views if not filled else ():
                view.zero_()
        self._flags().copy_(upload([float(each) for each in self.filled], self.dtype, self.device))

    def launch(self) -> None:
        """Launch the reduction."""
        assert self.flat is not None, "it is complete"
        if self.group is not None and self.is_sharded:
            self._arrived, self._works = self.group.launch_reduce_scatter(self.flat)
        elif self.group is not None:
            self._works = [self.group.launch_reduce(self.flat)]

    def arrive(self) -> None:
        """Wait for the reduction. The host reads at the end of the step which slots were used."""
        if self.group is not None:
            assert self._works, "it is launched"
            for work in self._works:
                self.group.wait(work)
            if self._arrived is not None:
                assert self.flat is not None, "it was sent"
                torch.sum(self._arrived, 0, out=self.flat.view_as(self._arrived)[self.row])
            self._works, self._arrived = [], None
        self._used = Download(self._flags()[self.row])

    def finish(self, *, reduced: bool) -> None:
        """End a step: `filled` says which slots have a gradient on some rank; a shard gets what it had before."""
        used, self._used = self._used, None
        if used is None and self.is_sharded and reduced and any(self.filled):
            self.complete()  # this rank alone has it
        elif used is not None and not self._allocate().is_meta:
            self.filled = [bool(flag) for flag in used.tolist()]
        self.reduced = reduced
        if self._held is not None:
            assert reduced, "a local step does not follow a reduced one"
            if any(self.filled):
                self.shard.add_(self._held)
            else:
                self.shard.copy_(self._held)
            self.filled = [one or other for one, other in zip(self.filled, self._held_filled, strict=True)]
            self._held = None

    def restore(self, before: BucketState) -> None:
        """Undo a step that failed. What may still be on its way in the memory of that step goes to its end there."""
        self._works, self._arrived, self._used, self._held = [], None, None, None
        self.flat, self.filled, self.reduced = None, list(before.filled), before.reduced
        if before.flat is None:
            return
        if self.is_sharded and before.reduced:
            self.shard.copy_(before.flat)
        elif self.is_sharded:
            self._allocate().copy_(before.flat)
        else:
            self.flat = before.flat
            self._views = self._all_views()

    def let_go(self) -> None:
        """Let go of the memory: what shows it keeps it."""
        self.flat, self._views = None, []

    def clear(self) -> None:
        """Forget the gradients; memory of shards stays."""
        self.filled, self.reduced = [False] * len(self.slots), False


def main_dtype(param: Tensor) -> torch.dtype:
    """Return the type in which the gradients of a parameter are summed."""
    return torch.float32 if param.dtype in LOW else param.dtype


def _slots(rows: Sequence[Owned]) -> list[GradientSlot]:
    runs: dict[tuple[nn.Parameter, ...], list[FlatRun]] = {}
    for row, owned in enumerate(rows):
        at = 0
        for params, first, last in owned:
            runs.setdefault(params, []).append(FlatRun(first, last, row, at))
            at += last - first
    return [GradientSlot(params, _joined(found, len(rows))) for params, found in runs.items()]


def _joined(runs: list[FlatRun], num_rows: int) -> tuple[FlatRun, ...]:
    """Return runs without those that continue the one before them in the same row."""
    joined: list[FlatRun] = []
    for run in sorted(runs):
        if joined and joined[-1].last == run.first and joined[-1].row == run.row:
            before = joined[-1]
            if before.at + before.last - before.first == run.at:
                joined[-1] = before._replace(last=run.last)
                continue
        joined.append(run)
    return tuple(joined)
