"""One chunk of a rank: a module with its forwards, backwards and halves, cut off from the stages beside it.

Each forward starts from leaves of its own and leaves behind only the edges at which its backward starts, so a stage's
output is free as soon as it has been sent. What arrives and what leaves is kept by micro-batch, never by order of
arrival.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from treadle.dist.boundary import fits
from treadle.runtime.model.calling import LayerCalls
from treadle.runtime.model.chunk import Chunk, check_losses
from treadle.runtime.model.edge import edge_of
from treadle.runtime.model.losses import MAIN, OwnLoss, split_off
from treadle.runtime.model.microbatch import Grads, Tensors
from treadle.runtime.model.seeding import Seeds
from treadle.runtime.model.weight_grad import AddGradient, WeightGrad, WeightGradQueue


class _Kept(NamedTuple):
    """The state that a backward needs of its forward, besides autograd's saved tensors."""

    inputs: Tensors
    roots: tuple[GradientEdge, ...]
    losses: tuple[OwnLoss, ...]


class Stage(Chunk):
    """A chunk whose module runs whole: forwards, backwards and their halves, which go to `halves`."""

    def __init__(
        self, number: int, module: nn.Module, halves: WeightGradQueue | None, seeds: Seeds | None, mb_offset: int
    ) -> None:
        super().__init__(number, module, seeds, mb_offset)
        self.halves = halves
        self._kept: dict[int, _Kept] = {}
        self._halves_of: dict[int, list[WeightGrad]] = {}
        self._autocast: str | None = None
        self._call = LayerCalls(module)

    def begin_step(self, scale: Tensor, aux_scale: Tensor) -> None:
        """Also notes whether autocast is on, and what was put on the module since the last step."""
        super().begin_step(scale, aux_scale)
        self._call.refresh()
        self._kept.clear()
        self._halves_of.clear()
        kind = scale.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        self._autocast = kind if on else None

    def forward(self, mb: int) -> None:
        """F: from `inputs` to `outputs`, or to the loss on the last stage."""
        microbatch = self.at(mb)
        inputs = microbatch.take_inputs()
        result, own = split_off(self._run(mb, inputs), microbatch.note)
        if self.loss_fn is not None:
            if self.seeds is not None:
                self.seeds.begin_loss(self.mb_offset + mb)
            main, more = split_off(self.loss_fn(result, microbatch.take_target()), microbatch.note)
            self._keep_loss(mb, inputs, (OwnLoss(main), *more, *own))
            microbatch.note(MAIN, main.detach())
            return
        outputs = result if isinstance(result, tuple) else (result,)
        if self.boundary is None or not fits(outputs, self.boundary):
            self._check(mb, outputs)
        roots = tuple([edge_of(o) for o in outputs if o.requires_grad])
        check_losses(loss for loss, _ in own)
        for loss in own:
            microbatch.add_loss(loss)
        if self.trains:
            self._kept[mb] = _Kept(inputs, roots, own)
        microbatch.put_outputs(tuple([o.detach() for o in outputs]), self.boundary)

    def _run(self, mb: int, inputs: Tensors) -> Any:
        try:
            side = self.at(mb).side
            if self.seeds is not None:
                self.seeds.begin_microbatch(self.mb_offset + mb)
                return self._call(inputs, side, self.seeds.begin_layer)
            return self._call(inputs, side) if side else self.module(*inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error) and "in-place" in str(error):
                raise ValueError(
                    f"stage {self.number} changes its input in place, which autograd does not allow where a graph "
                    "begins; let the first operation make a tensor of its own, for example x = x + y for x += y, or "
                    "nn.ReLU() for nn.ReLU(inplace=True)"
                ) from error
            raise

    def _keep_loss(self, mb: int, inputs: Tensors, losses: tuple[OwnLoss, ...]) -> None:
        check_losses(loss for loss, _ in losses)
        if self.trains:
            self._kept[mb] = _Kept(inputs, (), losses)
        for loss in losses:
            self.at(mb).add_loss(loss)

    def _check(self, mb: int, outputs: Tensors) -> None:
        """Checks that a stage returns tensors, in shapes that may cross to the next."""
        for output in outputs:
            if not isinstance(output, Tensor):
                raise ValueError(
                    f"stage {self.number} returned {type(output).__name__}; a stage returns a tensor, a tuple of "
                    "tensors, which the next stage gets as its arguments, or treadle.StageOutput(output, aux_loss); "
                    "return tuple(...) for a list, and tuple(....values()) for a dict. The last stage may return "
                    "anything"
                )
        self.keep_shape(mb, outputs)

    def backward(self, mb: int) -> None:
        """B: from the gradients of the outputs to those of the inputs and of all parameters."""
        inputs, roots, losses = self._kept.pop(mb)
        came = self._grads(mb)
        starts: list[Any] = [root for root, grad in zip(roots, came, strict=True) if grad is not None]
        grads = [grad for grad in came if grad is not None]
        if losses:
            starts += [own.loss for own in losses if own.loss.requires_grad]
            grads += [self.scale_of(own) for own in losses if own.loss.requires_grad]
        if starts and self._autocast is not None:
            with torch.autocast(self._autocast, enabled=False):  # a backward runs in the precision of its forward
                torch.autograd.backward(starts, grads)
        elif starts:
            torch.autograd.backward(starts, grads)
        self.at(mb).put_input_grads(tuple([x.grad for x in inputs if isinstance(x, Tensor) and x.requires_grad]))

    def _grads(self, mb: int) -> Grads:
        """Returns the gradients of the outputs; None for outputs that nobody read."""
        return self.at(mb).take_output_grads() if self.loss_fn is None else ()

    def input_half(self, mb: int) -> None:
        """I: as B, but defers the linears' weight gradients."""
        assert self.halves is not None
        self.halves.open()
        try:
            self.backward(mb)
        finally:
            self._halves_of[mb] = self.halves.close()

    def halves_of(self, mb: int) -> list[WeightGrad]:
        """Returns the deferred weight gradients of a micro-batch."""
        return self._halves_of[mb]

    def weight_half(self, mb: int, add: AddGradient) -> None:
        """W: runs the deferred weight gradients."""
        kind = self._autocast
        with torch.autocast(kind, enabled=False) if kind is not None else nullcontext():
            self.run_weight_grads(self._halves_of.pop(mb), mb, add)
