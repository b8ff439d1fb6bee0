"""The handlers of ops: what a rank calls for each kind of op, at either granularity.

A handler gets the op once, when a Pipeline is made, and returns the calls that every step makes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple, TypeAlias

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
from treadle.dist.channel import Posted
from treadle.ir.ops import COPIES, OpKind
from treadle.ir.program import Op, Program
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.model.layered import SEGMENT_OF, LayeredStage
from treadle.runtime.model.microbatch import Grads, Tensors
from treadle.runtime.model.stage import Stage
from treadle.runtime.run.rank_program import RankProgram

Call: TypeAlias = Callable[[], None]


class OpCalls(NamedTuple):
    """The calls of one op, in order. At layer granularity its lane makes them one after the other.

    At cell granularity one thread does everything: `prepare` and `launch` come at the op's turn and do not wait for the
    other rank; `finish` waits for it, just before the first reader of a receive or of gathered parameters, at the end
    of the step for a reduction.
    """

    launch: Call
    finish: Call | None = None
    prepare: Call | None = None

    def all(self) -> None:
        """Make all calls."""
        if self.prepare is not None:
            self.prepare()
        self.launch()
        if self.finish is not None:
            self.finish()


Handler: TypeAlias = Callable[[RankProgram, Op], OpCalls]


# -- computation -------------------------------------------------------------------------------------------------------


def _stage(part: RankProgram, op: Op) -> Stage:
    stage = part.stages[op.chunk]
    assert isinstance(stage, Stage)
    return stage


def forward(part: RankProgram, op: Op) -> OpCalls:
    """F."""
    return OpCalls(_then_forward(part, op, partial(_stage(part, op).forward, op.mb)))


def backward(part: RankProgram, op: Op) -> OpCalls:
    """B."""
    return OpCalls(_then_backward(part, op, partial(_stage(part, op).backward, op.mb)))


def input_grad(part: RankProgram, op: Op) -> OpCalls:
    """I."""
    return OpCalls(_then_backward(part, op, partial(_stage(part, op).input_half, op.mb)))


def weight_grad(part: RankProgram, op: Op) -> OpCalls:
    """W."""
    return OpCalls(partial(_stage(part, op).weight_half, op.mb, part.gradients.add))


def layer_part(part: RankProgram, op: Op) -> OpCalls:
    """A segment's forward, backward, weight gradient or recomputation, or a copy of what it saved."""
    stage = part.stages[op.chunk]
    assert isinstance(stage, LayeredStage)
    run = partial(stage.run, op.kind, op.mb, op.layer, part.gradients.add)
    if stage.ends_forward(op.kind, op.layer):
        return OpCalls(_then_forward(part, op, run))
    if stage.ends_backward(op.kind, op.layer):
        return OpCalls(_then_backward(part, op, run))
    return OpCalls(run)


def _then_forward(part: RankProgram, op: Op, run: Call) -> Call:
    """Behind the last part of a forward, hand the output to the stage after if this rank holds it too."""
    chunk, after, mb = part.stages[op.chunk], part.neighbour(op.chunk, +1), op.mb
    if after is None:
        return run

    def forward_here() -> None:
        run()
        made = chunk.at(mb)
        _as_leaves(made.outputs, chunk.boundary_at(mb))
        after.at(mb).put_inputs_from(made)

    return forward_here


def _then_backward(part: RankProgram, op: Op, run: Call) -> Call:
    """Behind the last part of an input gradient, hand it to the stage before if this rank holds it too."""
    chunk, before, mb = part.stages[op.chunk], part.neighbour(op.chunk, -1), op.mb
    if before is None:
        return run

    def backward_here() -> None:
        run()
        before.at(mb).put_output_grads(chunk.at(mb).take_input_grads())

    return backward_here


def _as_leaves(tensors: Tensors, boundary: Boundary) -> Tensors:
    for tensor, spec in zip(tensors, boundary, strict=True):
        if spec.grad:
            tensor.requires_grad_()
    return tensors


# -- messages ----------------------------------------------------------------------------------------------------------


def receive_forward(part: RankProgram, op: Op) -> OpCalls:
    """RECV_F: the inputs of a stage. Before the first message of a stage comes a header with their shapes.

    In a step whose micro-batches differ a header comes before each.
    """
    channel, stage, boundaries = part.incoming[op.lane.peer], part.stages[op.chunk], part.boundaries
    chunk, mb = op.chunk, op.mb
    posted: list[Posted] = []

    def post() -> None:
        if stage.differ or chunk not in boundaries:
            boundaries[chunk] = from_header(channel.receive_header(HEADER_SIZE))
        boundary = stage.at(mb).arrived = boundaries[chunk]
        posted[:] = [channel.post(boundary)]

    def arrive() -> None:
        microbatch = stage.at(mb)
        assert microbatch.arrived is not None, "its receive was posted"
        microbatch.put_inputs(_as_leaves(channel.wait_for(posted.pop()), microbatch.arrived))

    return OpCalls(post, arrive)


def receive_gradient(part: RankProgram, op: Op) -> OpCalls:
    """RECV_B: the gradients of a stage's outputs. A header says which outputs get one."""
    channel, stage, mb = part.incoming[op.lane.peer], part.stages[op.chunk], op.mb
    posted: list[Posted] = []

    def post() -> None:
        may_come = [spec for spec in stage.boundary_at(mb) if spec.grad]
        if stage.output_flags is None:
            stage.output_flags = from_flags(channel.receive_header(FLAGS_SIZE))
        posted[:] = [channel.post(tuple(compress(may_come, stage.output_flags)))]

    def arrive() -> None:
        flags = stage.output_flags
        assert flags is not None, "its receive was posted"
        came = channel.wait_for(posted.pop())
        rest = iter(came)
        grads = came if all(flags) else tuple([next(rest) if flag else None for flag in flags])
        stage.at(mb).put_output_grads(grads)

    return OpCalls(post, arrive)


def send_forward(part: RankProgram, op: Op) -> OpCalls:
    """SEND_F: the outputs of the stage that made them; the label is the reader's."""
    channel, mb = part.outgoing[op.lane.peer], op.mb
    stage = part.stages[maker_of(part.program, op).chunk]
    told = f"the output of stage {stage.number} for micro-batch {mb}"

    def send() -> None:
        if stage.differ or stage.header_due:
            stage.header_due = False
            channel.send_header(to_header(stage.boundary_at(mb), stage.number))
        channel.send(stage.at(mb).take_outputs(), told)

    return OpCalls(send)


def send_gradient(part: RankProgram, op: Op) -> OpCalls:
    """SEND_B: the gradients of the inputs of the stage that made them."""
    channel, mb, stage = part.outgoing[op.lane.peer], op.mb, part.stages[maker_of(part.program, op).chunk]
    told = f"the input gradient of stage {stage.number} for micro-batch {mb}"

    def send() -> None:
        grads = stage.at(mb).take_input_grads()
        if stage.input_flags is None:
            stage.input_flags = tuple([grad is not None for grad in grads])
            channel.send_header(to_flags(stage.input_flags))
        channel.send(_as_told(stage, mb, grads, channel.device), told)

    return OpCalls(send)


def maker_of(program: Program, send: Op) -> Op:
    """Return the op that makes what a send sends."""
    return next(maker for maker in map(program.op, program.deps(send.index)) if not maker.kind.is_recv)


def _as_told(stage: Chunk, mb: int, grads: Grads, device: torch.device) -> Sequence[Tensor]:
    """Return the gradients of a message: for the same inputs in every micro-batch, as receives are posted ahead."""
    boundary = stage.at(mb).arrived
    assert stage.input_flags is not None
    assert boundary is not None, "a message brought the inputs"
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


# -- reductions --------------------------------------------------------------------------------------------------------


def reduce_grad(part: RankProgram, op: Op) -> OpCalls:
    """REDUCE_GRAD, REDUCE_SCATTER, REDUCE_TIED: the gradients of a chunk, a bucket or a tie, summed over its ranks."""
    gradients, what = part.gradients, op.layer if op.kind is OpKind.REDUCE_TIED else (op.chunk, op.layer)
    return OpCalls(
        prepare=partial(gradients.gather, what),
        launch=partial(gradients.reduce, what),
        finish=partial(gradients.arrive, what),
    )


def gather_params(part: RankProgram, op: Op) -> OpCalls:
    """GATHER_PARAMS: the parameters of a bucket that other ranks have updated."""
    buckets = part.parameters.get((op.chunk, op.layer), ())

    def launch() -> None:
        for bucket in buckets:
            bucket.launch()

    def arrive() -> None:
        for bucket in buckets:
            bucket.arrive()

    return OpCalls(launch, arrive)


HANDLERS: dict[OpKind, Handler] = {
    OpKind.F: forward,
    OpKind.B: backward,
    OpKind.I: input_grad,
    OpKind.W: weight_grad,
    OpKind.RECV_F: receive_forward,
    OpKind.RECV_B: receive_gradient,
    OpKind.SEND_F: send_forward,
    OpKind.SEND_B: send_gradient,
    OpKind.REDUCE_GRAD: reduce_grad,
    OpKind.REDUCE_SCATTER: reduce_grad,
    OpKind.GATHER_PARAMS: gather_params,
    OpKind.REDUCE_TIED: reduce_grad,
    **dict.fromkeys((*SEGMENT_OF, *COPIES), layer_part),
}
"""For each kind of op, at either granularity, the calls that run it."""
