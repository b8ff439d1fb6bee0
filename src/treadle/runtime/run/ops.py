"""A rank's part of a Program as a list of instructions, and the loop that goes through it.

One thread does everything, in the order that `plan.running.host_order` made: it posts receives, waits for one just
before its reader, computes, launches sends and reductions. Communication goes on by itself in between. The list is
made once; a step only walks it, noting the time behind each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.dist.boundary import (
    FLAGS_SIZE,
    HEADER_SIZE,
    Boundary,
    from_flags,
    from_header,
    to_flags,
    to_header,
)
from treadle.dist.channel import Channel, Posted
from treadle.ir.program import LaneKind, Op, OpKind, Program
from treadle.plan.running import expected, host_order
from treadle.runtime.faults.progress.wait_target import ALIKE, NOBODY
from treadle.runtime.model.chunk import Chunk, Grads, Tensors
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.stage import Stage


class Instruction(NamedTuple):
    """`op` is the Program's op it belongs to; `peer` the rank it may have to wait for, or NOBODY."""

    op: int
    run: Callable[[], None]
    peer: int


@dataclass
class RankProgram:
    """What a rank's instructions work on."""

    program: Program
    pp_rank: int
    stages: Mapping[int, Chunk]
    outgoing: Mapping[int, Channel]
    incoming: Mapping[int, Channel]
    gradients: Gradients
    global_rank: Callable[[int], int]
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    """What arrives at a chunk, once its header came."""


def instructions(part: RankProgram) -> list[Instruction]:
    """The rank's ops, in the order its thread comes to them, with a wait before each reader."""
    program = part.program
    posted: dict[int, Posted] = {}
    made: list[Instruction] = []
    last: list[Instruction] = []
    for index in host_order(program, expected(program))[part.pp_rank]:
        op = program.op(int(index))
        if op.lane.kind is LaneKind.COMPUTE:
            for needed in map(program.op, program.deps(op.index)):
                if needed.kind.is_recv:
                    peer = part.global_rank(needed.lane.peer)
                    made.append(Instruction(needed.index, arrive(part, needed, posted), peer))
            made.append(Instruction(op.index, _compute(part, op), NOBODY))
        elif op.kind.is_recv:
            made.append(Instruction(op.index, post(part, op, posted), part.global_rank(op.lane.peer)))
        elif op.kind.is_send:
            peer = part.global_rank(op.lane.peer)
            made.append(Instruction(op.index, send(part, op), peer))
            if op.index + 1 in program.lane_ptr:  # the last of its channel
                last.append(Instruction(op.index, part.outgoing[op.lane.peer].drain, peer))
        else:
            made.append(Instruction(op.index, partial(part.gradients.gather, op.chunk), NOBODY))
            made.append(Instruction(op.index, partial(part.gradients.reduce, op.chunk), ALIKE))
            last.append(Instruction(op.index, partial(part.gradients.arrive, op.chunk), ALIKE))
    return made + last


def post_early(listed: Sequence[Instruction], program: Program) -> list[Instruction]:
    """Moves each receive up to where its buffer is free: behind the ops that it depends on.

    Receives of one channel keep their order. A rank whose receives are posted sooner blocks less often, and its peer
    too. Only once headers have come, which a post would wait for, and only on gloo: a receive of NCCL's that waits for
    its peer holds up what is launched behind it.
    """
    place: dict[int, int] = {}
    last: dict[int, int] = {}
    turn = []
    for at, instruction in enumerate(listed):
        index = instruction.op
        is_post = index not in place and program.op(index).kind.is_recv
        place.setdefault(index, at)
        behind = at
        if is_post:
            lane = int(program.lane_of[index])
            behind = last[lane] = max([last.get(lane, -1), *(place[dep] for dep in program.deps(index))])
        turn.append((behind, is_post, at))
    return [listed[at] for _, _, at in sorted(turn)]


def _compute(part: RankProgram, op: Op) -> Callable[[], None]:
    stage, mb = part.stages[op.chunk], op.mb
    assert isinstance(stage, Stage)
    if op.kind is OpKind.W:
        return partial(stage.weight_half, mb, part.gradients.add)
    if op.kind is OpKind.F:
        return then_forward(part, op, partial(stage.forward, mb))
    run = stage.input_half if op.kind is OpKind.I else stage.backward
    return then_backward(part, op, partial(run, mb))


def then_forward(part: RankProgram, op: Op, run: Callable[[], None]) -> Callable[[], None]:
    """Behind the last of a forward: where the stage after is on the same rank, it gets the output without a message."""
    chunk, after, mb = part.stages[op.chunk], _neighbour(part, op.chunk, +1), op.mb
    if after is None:
        return run

    def forward_here() -> None:
        run()
        assert chunk.boundary is not None
        after.inputs[mb] = _as_leaves(chunk.outputs[mb], chunk.boundary)
        after.given_by[mb] = chunk

    return forward_here


def then_backward(part: RankProgram, op: Op, run: Callable[[], None]) -> Callable[[], None]:
    """Behind the last of an input gradient: the same for the stage before."""
    chunk, before, mb = part.stages[op.chunk], _neighbour(part, op.chunk, -1), op.mb
    if before is None:
        return run

    def backward_here() -> None:
        run()
        before.output_grads[mb] = chunk.input_grads.pop(mb)

    return backward_here


def _neighbour(part: RankProgram, chunk: int, step: int) -> Chunk | None:
    """The stage beside this one, if it is on the same rank: then nothing is sent."""
    place = part.program.layout.placement.neighbour(part.pp_rank, chunk, step)
    return part.stages[place[1]] if place is not None and place[0] == part.pp_rank else None


def _as_leaves(tensors: Tensors, boundary: Boundary) -> Tensors:
    for tensor, spec in zip(tensors, boundary, strict=True):
        if spec.grad:
            tensor.requires_grad_()
    return tensors


def post(part: RankProgram, op: Op, posted: dict[int, Posted]) -> Callable[[], None]:
    """Launches a receive."""
    channel, stage, boundaries = part.incoming[op.lane.peer], part.stages[op.chunk], part.boundaries

    def post_forward() -> None:
        if op.chunk not in boundaries:
            boundaries[op.chunk] = from_header(channel.receive_header(HEADER_SIZE))
        posted[op.index] = channel.post(boundaries[op.chunk])

    def post_gradient() -> None:
        assert stage.boundary is not None, "its forward has run"
        if stage.output_flags is None:
            stage.output_flags = from_flags(channel.receive_header(FLAGS_SIZE))
        may_come = [spec for spec in stage.boundary if spec.grad]
        posted[op.index] = channel.post(tuple(compress(may_come, stage.output_flags)))

    return post_forward if op.kind is OpKind.RECV_F else post_gradient


def arrive(part: RankProgram, op: Op, posted: dict[int, Posted]) -> Callable[[], None]:
    """Waits for a receive, and gives its reader what came."""
    channel, stage, boundaries = part.incoming[op.lane.peer], part.stages[op.chunk], part.boundaries
    index, chunk, mb = op.index, op.chunk, op.mb

    def forward() -> None:
        stage.inputs[mb] = _as_leaves(channel.wait_for(posted.pop(index)), boundaries[chunk])

    def gradient() -> None:
        flags = stage.output_flags
        assert flags is not None, "its receive was posted"
        came = channel.wait_for(posted.pop(index))
        rest = iter(came)
        stage.output_grads[mb] = came if all(flags) else tuple([next(rest) if flag else None for flag in flags])

    return forward if op.kind is OpKind.RECV_F else gradient


def send(part: RankProgram, op: Op) -> Callable[[], None]:
    """A send's label is its reader's; what it sends is made by the op it waits for."""
    channel, mb = part.outgoing[op.lane.peer], op.mb
    needed = map(part.program.op, part.program.deps(op.index))
    chunk = next(maker.chunk for maker in needed if not maker.kind.is_recv)
    stage = part.stages[chunk]
    told = stage.told(mb)
    if op.kind is OpKind.SEND_B:
        told = f"the input gradient of stage {stage.number} for micro-batch {mb}"

    def send_gradient() -> None:
        grads = stage.input_grads.pop(mb)
        if stage.input_flags is None:
            stage.input_flags = tuple([grad is not None for grad in grads])
            channel.send_header(to_flags(stage.input_flags))
        channel.send(_as_told(stage, mb, grads, part.boundaries[chunk], channel.device), told)

    def send_forward() -> None:
        if stage.header_due:
            stage.header_due = False
            assert stage.boundary is not None, "its forward has run"
            channel.send_header(to_header(stage.boundary, stage.number))
        channel.send(stage.take_outputs(mb), told)

    return send_forward if op.kind is OpKind.SEND_F else send_gradient


def _as_told(stage: Chunk, mb: int, grads: Grads, boundary: Boundary, device: torch.device) -> Sequence[Tensor]:
    """The gradients that a message carries: for the same inputs in every micro-batch, as receives are posted ahead."""
    assert stage.input_flags is not None
    message = [grad for grad in grads if grad is not None]
    if len(message) == len(grads) and all(stage.input_flags):
        return message
    message = []
    specs = [spec for spec in boundary if spec.grad]
    for at, (grad, flag, spec) in enumerate(zip(grads, stage.input_flags, specs, strict=True)):
        if grad is not None and not flag:
            raise ValueError(
                f"stage {stage.number} used its input {at} in micro-batch {mb}, but not in the first; an input is used "
                "in all micro-batches or in none: add 0 * input.sum() to an output where it is not needed"
            )
        if flag:
            message.append(grad if grad is not None else spec.empty(device).zero_())
    return message


def walk(listed: Sequence[Instruction], slots: memoryview, now: Callable[[], Any], ends: list[Any]) -> None:
    """Runs a step. `slots` shows others where this rank is; `ends` gets the times, as `now` tells them."""
    note = ends.append
    note(now())
    for op, run, peer in listed:
        slots[0] = op
        slots[1] = peer
        run()
        note(now())


def where(listed: Sequence[Instruction], ends: list[Any]) -> Instruction:
    """The instruction that a step which failed was at; behind the last it is the last."""
    return listed[min(len(ends), len(listed)) - 1]
