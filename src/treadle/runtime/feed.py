"""Giving the stages of a rank their micro-batches: inputs where the first stage is, targets where losses are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from treadle.ir import Schedule
from treadle.runtime.model.chunk import Chunk, tensors_within
from treadle.runtime.model.layered import LayeredStage
from treadle.runtime.model.side import Side, refuse_unread


def feed(
    stages: Mapping[int, Chunk], schedule: Schedule, inputs: Any, targets: Any, side: Side, readable: Iterable[str]
) -> None:
    """Give the first and the last stages their micro-batches, and all stages the side values, which are `readable`."""
    refuse_unread(side, readable)
    beside = sides_of(side, schedule.num_microbatches)
    per_pipe = schedule.microbatches_per_pipe
    for chunk, stage in stages.items():
        first_mb = schedule.placement.pipes[chunk] * per_pipe
        mine = slice(first_mb, first_mb + per_pipe)
        stage.check_module()
        stage.check_side(side)
        if stage.trains:
            refuse_graph(side, "side values")
        for mb, values in enumerate(beside[mine]):
            stage.at(mb).side = values
        _feed_ends(stage, schedule, mine, inputs, targets)


def _feed_ends(stage: Chunk, schedule: Schedule, mine: slice, inputs: Any, targets: Any) -> None:
    """Give a first stage its inputs, and one with losses its targets. `mine` are the micro-batches of its pipe."""
    num = schedule.num_microbatches
    if stage.number == 0:
        if stage.trains:
            refuse_graph(inputs, "inputs")
        for mb, x in enumerate(microbatches(inputs, num, "inputs")[mine]):
            stage.at(mb).put_inputs(_cut_off(x))
    mtp = stage.mtp if isinstance(stage, LayeredStage) else []
    if mtp and targets is None:
        raise ValueError(
            f"stage {stage.number} has an MTP block ({type(mtp[0]).__name__}), which predicts from targets, "
            "got NoneType; give targets on the ranks that hold it, as on those that hold the last stage"
        )
    if stage.number == schedule.placement.num_stages - 1 or mtp:
        if stage.trains:
            refuse_graph(targets, "targets")
        for mb, target in enumerate(targets_of(targets, num)[mine]):
            stage.at(mb).put_target(target)


def _cut_off(microbatch: Any) -> tuple[Any, ...]:
    """Return the arguments of the first stage, without a graph."""
    given = microbatch if isinstance(microbatch, tuple) else (microbatch,)
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in given)


def microbatches(given: Any, num: int, what: str) -> list[Any]:
    """Return the micro-batches of a batch: a list, or a tensor that is cut along its first dimension."""
    if isinstance(given, Tensor):
        if given.dim() == 0 or given.shape[0] % num or given.shape[0] == 0:
            size = given.shape[0] if given.dim() else "no dimension to cut"
            raise ValueError(
                f"{what} of {num} micro-batches are a batch that {num} divides, got {size}; "
                f"give a multiple of {num}, or a list of {num}"
            )
        return list(given.chunk(num))
    if isinstance(given, Sequence) and not isinstance(given, tuple):  # a tuple is one micro-batch of several tensors
        if len(given) != num:
            raise ValueError(f"the schedule has {num} micro-batches, got {len(given)} {what}")
        return list(given)
    raise ValueError(f"{what} are a tensor, or a list with one entry a micro-batch, got {type(given).__name__}")


def targets_of(given: Any, num: int) -> list[Any]:
    """Return the targets of each micro-batch; None for each if there are none, as a loss function may ignore them."""
    return [None] * num if given is None else microbatches(given, num, "targets")


def sides_of(side: Mapping[str, Any], num: int) -> list[dict[str, Any]]:
    """Return the side values of each micro-batch."""
    cut = {name: microbatches(values, num, f"side values {name!r}") for name, values in side.items()}
    return [{name: values[mb] for name, values in cut.items()} for mb in range(num)]


def refuse_graph(given: Any, what: str) -> None:
    """Refuse inputs or targets that require a gradient: none would come back for them."""
    for tensor in tensors_within(given):
        if tensor.requires_grad:
            made_by = f"made by {tensor.grad_fn.name()}" if tensor.grad_fn is not None else "a leaf that requires one"
            raise ValueError(
                f"{what} require a gradient ({made_by}), but gradients do not leave a pipeline: what made them would "
                "not train; make it part of the first or the last stage, or give them as detach()"
            )
