"""The pieces of a model's tensors that a rank updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.models.views import NamedView
from treadle.runtime.model.gradient_bucket import LOW, GradientBucket
from treadle.train.optim.division import Run


@dataclass(frozen=True)
class OwnedPiece:
    """A run of a tensor's elements that this rank updates."""

    view: NamedView
    run: Run
    bucket: GradientBucket
    slot: int
    at: int
    """Where the run's gradients begin in this rank's shard of the bucket."""

    master: Tensor
    """What the optimizer updates: a float32 copy of a two-byte parameter's run, else its memory."""

    @classmethod
    def of(cls, view: NamedView, run: Run, bucket: GradientBucket, at: int, *, is_matrix: bool) -> OwnedPiece:
        """Make a piece. As a matrix it is all of the view, in the view's shape."""
        param = slice_of(view, run)
        master = param.float() if param.dtype in LOW else param
        slot = bucket.number_of(view.tensor)
        return cls(view, run, bucket, slot, at, master.view_as(view.of(view.tensor)) if is_matrix else master)

    @property
    def param(self) -> Tensor:
        """The run in the parameter's memory, flat."""
        return slice_of(self.view, self.run)

    @property
    def has_master(self) -> bool:
        """True if the master is memory of its own."""
        return self.view.tensor.dtype in LOW

    def follow(self) -> None:
        """Take into the master what was written to the parameter since the last update, or to a new `.data`.

        Values are compared, as no version counts writes to `.data`; on the device, without a wait.
        """
        param = self.param
        if not self.has_master:
            if param.data_ptr() != self.master.data_ptr():
                self.master.data = param.view_as(self.master)
            return
        master = self.master.view(-1)
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))

    @property
    def gradient(self) -> Tensor | None:
        """The run's main gradient, in the bucket's memory; None where no rank used the parameter."""
        return self.bucket.shard[self.at : self.at + len(self.run)] if self.bucket.filled[self.slot] else None

    def take_gradient(self) -> None:
        """Give the master its gradient, and what was written to the parameter."""
        self.follow()
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
