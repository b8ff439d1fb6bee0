"""A stage as messages see it: its module, the shapes that cross its ends, and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from treadle.dist.boundary import Boundary, Flags, boundary_of, differ_in_shape, fits
from treadle.runtime.model.grouped_linear import GroupedLinear
from treadle.runtime.model.losses import OwnLoss, StageOutput
from treadle.runtime.model.microbatch import Microbatch, Tensors
from treadle.runtime.model.seeding import Seeds
from treadle.runtime.model.side import Side
from treadle.runtime.model.weight_grad import AddGradient, WeightGrad

LossFn: TypeAlias = Callable[[Any, Any], Tensor | StageOutput]

_ONE_SHAPE = (
    "all micro-batches have one shape: pad them, or make the Pipeline with shapes='each', or with shapes='any' where "
    "inputs of one shape come to outputs of several"
)
_ONLY_SHAPES = (
    "micro-batches may differ in shape, but not in the number of tensors, their dtypes and which of them require a "
    "gradient: return the same for all"
)


class Chunk:
    """The module of stage `number`. `mb_offset` turns a micro-batch of its pipe into one of the global batch.

    `trains`: are backwards to come. `differ`: micro-batches of this step have shapes of their own, so that a header
    goes ahead of each message.
    """

    trains = True
    differ = False

    def __init__(self, number: int, module: nn.Module, seeds: Seeds | None, mb_offset: int) -> None:
        self.number, self.module, self.seeds, self.mb_offset = number, module, seeds, mb_offset
        self.loss_fn: LossFn | None = None
        self.boundary: Boundary | None = None
        self.header_due = True
        self.output_flags: Flags | None = None
        """For which outputs gradients come, once the stage behind has told."""
        self.input_flags: Flags | None = None
        """For which inputs this stage sends gradients, once it has told the stage before."""
        self._microbatches: dict[int, Microbatch] = {}
        self._scales: dict[bool, Tensor] = {}

    def begin_step(self, scale: Tensor, aux_scale: Tensor) -> None:
        """Forgets what a step that failed may have left; gradients of losses start at `scale` and `aux_scale`."""
        self._microbatches = {}
        for part in self.module.modules():
            if isinstance(part, GroupedLinear):
                part.forget_lower()
        self._scales = {False: scale, True: aux_scale}

    def check_side(self, side: Side) -> None:
        """Raises ValueError if a side value that this stage cannot do without is not there."""

    def check_module(self) -> None:
        """Raises ValueError if something was put on the module since that its ops would pass by."""

    def run_weight_grads(self, halves: Iterable[WeightGrad], mb: int, add: AddGradient) -> None:
        """Runs deferred weight gradients. Raises ValueError if one was written to that it is computed from."""
        for half in halves:
            if half.is_void:
                name = next((name for name, part in self.module.named_modules() if part is half.module), "")
                raise ValueError(
                    f"stage {self.number}: the input of {name or 'its module'} ({type(half.module).__name__}) for "
                    f"micro-batch {mb}, or the gradient of its output, was written to between its input gradient and "
                    "its weight gradient, which would be wrong; give the module a tensor of its own in each forward: "
                    "buffer.clone() for a buffer that forwards reuse"
                )
            half.run(add)

    def forget_shape(self) -> None:
        """The next micro-batches may have another shape; its reader is told again."""
        self.boundary, self.header_due = None, True

    def at(self, mb: int) -> Microbatch:
        """Return the data of a micro-batch. Lanes' threads may ask at once, and get the same."""
        found = self._microbatches.get(mb)
        return found if found is not None else self._microbatches.setdefault(mb, Microbatch(self.number, mb))

    def microbatches(self) -> Collection[Microbatch]:
        """Return the data of all micro-batches of this step so far."""
        return self._microbatches.values()

    def keep_shape(self, mb: int, outputs: Tensors) -> None:
        """Keep the shapes of the outputs. Where receives are posted ahead, they are those of all micro-batches."""
        before = self.boundary
        if before is not None and fits(outputs, before):
            return
        boundary = boundary_of(outputs)
        if before is not None and not (self.differ and differ_in_shape(boundary, before)):
            got, first = (", ".join(map(str, b)) for b in (boundary, before))
            rule = _ONLY_SHAPES if self.differ else _ONE_SHAPE
            raise ValueError(f"stage {self.number} returned {got} for micro-batch {mb}, but {first} before; {rule}")
        self.boundary = boundary

    def boundary_at(self, mb: int) -> Boundary:
        """Return the shapes of a micro-batch's outputs. Where all have one shape, its forward may be still to come."""
        boundary = self.at(mb).boundary if self.differ else self.boundary
        assert boundary is not None, f"a forward of stage {self.number} has run"
        return boundary

    def scale_of(self, own: OwnLoss) -> Tensor:
        """Return a loss's scale in its precision, rounded from float64 on the lane that asks.

        Another lane's would have to be waited for.
        """
        return self._scales[own.aux].to(own.loss.dtype)


@dataclass(frozen=True)
class CheckedLoss:
    """The user's loss function after `module`, the last stage: one that trains nothing, or itself, is refused."""

    loss_fn: LossFn
    module: nn.Module
    parameters: Callable[[], Iterable[nn.Parameter]]
    """Yields the parameters of all stages of this rank."""

    def __call__(self, output: Any, target: Any) -> Tensor | StageOutput:
        """Returns the loss of a micro-batch, or with further ones."""
        try:
            loss = self.loss_fn(output, target)
        except (AttributeError, TypeError) as error:
            if target is None:
                raise ValueError(
                    f"loss_fn cannot do without targets ({type(error).__name__}: {error}), got NoneType; give targets "
                    "on the ranks that hold the last stage: a tensor, or a list with one entry a micro-batch"
                ) from error
            raise
        main = loss.output if isinstance(loss, StageOutput) else loss
        if torch.is_grad_enabled() and isinstance(main, Tensor) and main.requires_grad:
            self._refuse_parameters(output, main)
        if torch.is_grad_enabled() and isinstance(main, Tensor) and not main.requires_grad:
            self._refuse_cut_off(output, main)
        return loss

    def _refuse_parameters(self, output: Any, loss: Tensor) -> None:
        """Refuse a loss function that trains something: nothing reduces its gradient, and no optimizer here has it."""
        outputs = list(tensors_within(output))
        for leaf in _leaves_before(loss, outputs):
            if not isinstance(output, Tensor) and not isinstance(leaf, nn.Parameter):
                continue  # perhaps the stage's input, by a way around the tensors that were found in the output
            if not any(leaf is known for known in (*outputs, *self.parameters())):
                named = self.loss_fn.named_parameters() if isinstance(self.loss_fn, nn.Module) else ()
                name = next((name for name, param in named if param is leaf), "a tensor")
                raise ValueError(
                    f"loss_fn trains {name} of shape {list(leaf.shape)}, which is in no stage: its gradient would not "
                    "be reduced, and differ on each replica; make it a part of the last stage's module, which may "
                    "return a tuple with it, or freeze it by requires_grad_(False)"
                )

    def _refuse_cut_off(self, output: Any, loss: Tensor) -> None:
        """Where nothing trains, a loss without a graph is what one process has too."""
        check_losses((loss,))
        if not any(t.requires_grad for t in (*tensors_within(output), *self.module.parameters())):
            return
        if loss.is_floating_point():
            what = "is cut off from the output: it does not require a gradient (detach(), item(), no_grad()?)"
        else:
            what = f"is {loss.dtype}, which has no gradient"
        raise ValueError(
            f"the loss that loss_fn returned {what}, so nothing would train; return a loss computed from the output "
            "by differentiable operations, or call evaluate() if nothing is to train"
        )


def _leaves_before(loss: Tensor, ends: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of a graph whose gradients its backward makes, those beyond `ends` excepted."""
    seen = {node for end in ends if (node := end.grad_fn) is not None}
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        ahead += [following for following, _ in node.next_functions]


def tensors_within(thing: Any) -> Iterator[Tensor]:
    """Yields a tensor, or those in tuples, lists and dicts."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from tensors_within(part)
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from tensors_within(part)


def check_losses(losses: Iterable[Any]) -> None:
    """Refuses what is not one number for a micro-batch."""
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"a loss is one number for a micro-batch, got {got}; return its sum or its mean")
