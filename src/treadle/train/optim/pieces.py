"""The pieces of a model's tensors that a rank updates, and how other ranks get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.dist.groups import Group
from treadle.models.views import NamedView
from treadle.runtime.model.gradient_bucket import LOW, GradientBucket
from treadle.train.optim.division import Run, Shares


@dataclass(frozen=True)
class OwnedPiece:
    """A run of a tensor's elements that this rank updates."""

    view: NamedView
    run: Run
    bucket: GradientBucket
    slot: int
    at: int
    """Where the run's gradients begin in this rank's shard of the bucket."""

    param: Tensor
    """The run in the parameter itself, flat."""

    master: Tensor
    """What the optimizer updates: the float32 copy of a two-byte `param`, else the same memory."""

    @classmethod
    def of(cls, view: NamedView, run: Run, bucket: GradientBucket, at: int, *, is_matrix: bool) -> OwnedPiece:
        """Make a piece. As a matrix it is all of the view, in the view's shape."""
        param = slice_of(view, run)
        master = param.float() if param.dtype in LOW else param
        slot = bucket.number_of(view.tensor)
        return cls(view, run, bucket, slot, at, param, master.view_as(view.of(view.tensor)) if is_matrix else master)

    @property
    def has_master(self) -> bool:
        """True if the master is memory of its own."""
        return self.master.dtype != self.param.dtype

    @property
    def gradient(self) -> Tensor | None:
        """The run's main gradient, in the bucket's memory; None where no rank used the parameter."""
        return self.bucket.shard[self.at : self.at + len(self.run)] if self.bucket.filled[self.slot] else None

    def take_gradient(self) -> None:
        """Give the master its gradient."""
        gradient = self.gradient
        self.master.grad = gradient.view_as(self.master) if gradient is not None else None

    def round(self) -> None:
        """Put the updated master into the parameter, and let go of the gradient."""
        if self.has_master and self.master.grad is not None:
            self.param.copy_(self.master.view(-1))
        self.master.grad = None


def slice_of(view: NamedView, run: Run) -> Tensor:
    """Return a run of a view's elements, in the memory of its parameter."""
    begin = view.run[0]
    return view.tensor.detach().view(-1)[begin + run.first : begin + run.last]


class ParameterBucket:
    """Tensors of one type whose updated runs the ranks of a group exchange at once."""

    def __init__(self, group: Group, shares: Shares, views: Sequence[NamedView]) -> None:
        self._group = group
        self._runs = [[slice_of(views[run.tensor], run) for run in runs] for runs in shares]
        self._size = max(sum(len(run) for run in runs) for runs in shares)
        self._like = views[0].tensor.detach()

    def gather(self) -> None:
        """Replace the other ranks' runs of the parameters by what those ranks have; all ranks call it."""
        own = self._runs[self._group.group_rank]
        room = self._like.new_zeros(self._size - sum(map(len, own)))
        rows = self._group.all_gather(torch.cat([*own, room]).view(torch.uint8))  # bytes: any type, bit by bit
        for number, (row, runs) in enumerate(zip(rows, self._runs, strict=True)):
            if number != self._group.group_rank:
                values = row.view(self._like.dtype)
                for run in runs:
                    run.copy_(values[: len(run)])
                    values = values[len(run) :]
