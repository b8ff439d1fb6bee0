"""A rank of a world that is not there: its part is built on torch's fake backend with meta tensors, and runs a step.

Everything a rank does happens, modules, autograd, messages, reductions, but for the numbers and the other ranks. What
it says about messages, communicators and memory is counted from what the step did, not from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

from treadle.dist.boundary import Boundary, Spec
from treadle.dist.channel import Channel, Posted
from treadle.ir import Schedule
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Op, Program
from treadle.runtime.model.chunk import LossFn
from treadle.runtime.model.gradient_bucket import main_dtype
from treadle.runtime.model.meta_bytes import MetaBytes, OpBytes
from treadle.runtime.model.saved import LiveBytes, SavedTensors
from treadle.runtime.model.stage import Stage
from treadle.runtime.pipeline import Pipeline
from treadle.runtime.pipeline_options import RunOptions
from treadle.runtime.rank_part import RankPart
from treadle.runtime.run.handlers import Call, Handler, OpCalls
from treadle.runtime.run.rank_program import RankProgram


@dataclass(frozen=True)
class Toy:
    """The model of a dry run: stages of `layers` residual MLPs, of `width` and four times that, in bfloat16."""

    width: int = 1024
    layers: int = 1
    tokens: int = 4096

    def stage(self) -> nn.Module:
        """One stage, without memory behind it."""
        with torch.device("meta"):
            return nn.Sequential(*[_Layer(self.width) for _ in range(self.layers)]).bfloat16()

    def microbatch(self) -> Tensor:
        """One micro-batch."""
        return torch.empty(self.tokens, self.width, dtype=torch.bfloat16, device="meta")

    @property
    def boundary(self) -> Boundary:
        """What crosses between its stages."""
        return (Spec((self.tokens, self.width), torch.bfloat16, True),)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


@dataclass(frozen=True)
class Sent:
    """What went over one channel, at this rank's end."""

    num_messages: int
    num_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """What a rank did in one step. Channels are keyed by (from, to), numbers of ranks along pp.

    `gradient_bytes` is what gradients take while they are summed, `peak_saved_bytes` what forwards left for backwards,
    `peak_bytes` the most that all tensors took at once, at the op `peak_at`: a batch too, where the first stage is.
    """

    pp_rank: int
    dp_rank: int
    program: Program
    channels: dict[tuple[int, int], Sent]
    groups: dict[str, int]
    num_communicators: int
    parameter_bytes: int
    gradient_bytes: int
    peak_saved_bytes: int
    peak_buffer_bytes: int
    peak_bytes: int
    peak_at: str


class RehearsalRecorder:
    """Counts what a rank's ops send, receive, save and hold, in the part that `instrument` returns."""

    def __init__(self, pp_rank: int, stages: Mapping[int, nn.Module]) -> None:
        self.pp_rank = pp_rank
        self.memory, self.buffers = MetaBytes(), LiveBytes()
        self.saved = SavedTensors(stages.values(), None)
        self.traffic: dict[tuple[int, int], list[int]] = {}
        self.ops: list[tuple[Op, OpBytes]] = []
        """The memory of each call of an op, in the order in which they ran."""
        self.store: SavedTensors | None = None
        """What saved tensors of layers go through, if they do."""
        self.peak_bytes, self.peak_at = 0, ""

    def instrument(self, part: RankPart) -> RankPart:
        """Return the same with calls and channels that count."""
        here, self.store = self.pp_rank, part.recipe.store
        outgoing = {peer: self._channel(channel, (here, peer)) for peer, channel in part.outgoing.items()}
        incoming = {peer: self._channel(channel, (peer, here)) for peer, channel in part.incoming.items()}
        handlers = {kind: partial(self._calls, handler) for kind, handler in part.handlers.items()}
        return replace(part, outgoing=outgoing, incoming=incoming, handlers=handlers)

    def _channel(self, channel: Channel, key: tuple[int, int]) -> Channel:
        return _CountingChannel(channel, self.traffic.setdefault(key, []), self.buffers)

    def _calls(self, handler: Handler, part: RankProgram, op: Op) -> OpCalls:
        calls = handler(part, op)
        counted = {name: partial(self._run, run, part, op) for name, run in calls._asdict().items() if run is not None}
        return calls._replace(**counted)

    def _run(self, run: Call, part: RankProgram, op: Op) -> None:
        """Run a call of an op, and count what autograd saves, what weight gradients hold until they run, and all."""
        key = op.chunk, op.mb, 0
        with self.saved.saving(key, "f") if op.kind is OpKind.F else nullcontext():
            self.ops.append((op, self.memory.measure(run)))
        if op.kind is OpKind.I:
            stage = part.stages[op.chunk]
            assert isinstance(stage, Stage)
            self.saved.hold_halves(key, "i", stage.halves_of(op.mb))
        elif op.kind is OpKind.W:
            self.saved.drop_halves(key, "i")
        if self.memory.peak > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.memory.peak, str(op)


class _CountingChannel(Channel):
    """A channel that notes the bytes of its messages in `sizes`. A receive buffer counts until its reader has it."""

    def __init__(self, channel: Channel, sizes: list[int], buffers: LiveBytes) -> None:
        super().__init__(channel.communicator, channel.peer, channel.device, channel.wait, channel.control)
        self._sizes, self._buffers = sizes, buffers

    def send(self, tensors: Sequence[Tensor], told: str) -> None:
        self._sizes.append(sum(t.nbytes for t in tensors))
        super().send(tensors, told)

    def post(self, boundary: Boundary) -> Posted:
        posted = super().post(boundary)
        self._sizes.append(sum(t.nbytes for t in posted[0]))
        for tensor in posted[0]:
            self._buffers.hold(tensor)
        return posted

    def wait_for(self, posted: Posted) -> tuple[Tensor, ...]:
        for tensor in posted[0]:
            self._buffers.release(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes())
        return super().wait_for(posted)


class _RehearsedPipeline(Pipeline):
    """A Pipeline whose ops and channels report to a recorder."""

    def __init__(
        self, recorder: RehearsalRecorder, stages: Mapping[int, nn.Module], schedule: Schedule, **given: Any
    ) -> None:
        self._recorder = recorder
        super().__init__(stages, schedule, **given)

    def instrument(self, part: RankPart) -> RankPart:
        return self._recorder.instrument(part)


@contextmanager
def rehearsing(
    stages: Mapping[int, nn.Module],
    schedule: Schedule,
    sizes: Mapping[str, int],
    rank: int,
    loss_fn: LossFn,
    options: RunOptions,
) -> Iterator[tuple[Pipeline, RehearsalRecorder]]:
    """Make the Pipeline of rank `rank` of a mesh of `sizes`, of meta tensors, and count what it makes within the block.

    Makes the default process group, and takes it away again.
    """
    if dist.is_initialized():
        raise ValueError(
            "a dry run makes a world of its own, and this process is in one; call it before init_process_group, or "
            "after destroy_process_group"
        )
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()), store=HashStore())
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        recorder = RehearsalRecorder(mesh.get_local_rank("pp"), stages)
        with recorder.memory:
            yield (
                _RehearsedPipeline(recorder, stages, schedule, mesh=mesh, loss_fn=loss_fn, options=options),
                recorder,
            )
    finally:
        dist.destroy_process_group()


def rehearse(schedule: Schedule, world: int, rank: int, toy: Toy) -> Rehearsal:
    """Run a step as rank `rank` of a world of `world`."""
    pp = schedule.pp
    if world % pp or world < 1:
        raise ValueError(f"pipelines of {pp} ranks fill a world of {pp}, {2 * pp}, ... ranks, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"a world of {world} has the ranks 0 to {world - 1}, got {rank}")
    stages = {chunk: toy.stage() for chunk in range(schedule.vpp)}
    known = dict.fromkeys(range(schedule.placement.num_stages - 1), toy.boundary)
    options = RunOptions(boundaries=known, seed=None)
    with rehearsing(stages, schedule, {"pp": pp, "dp": world // pp}, rank, _loss, options) as (pipe, recorder):
        return _run(pipe, toy, recorder)


def _loss(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean()


def _run(pipe: Pipeline, toy: Toy, recorder: RehearsalRecorder) -> Rehearsal:
    is_first = any(stage.number == 0 for stage in pipe.stages.values())
    recorder.saved.begin()
    pipe.step([toy.microbatch() for _ in range(pipe.schedule.num_microbatches)] if is_first else None)
    groups = {"pipe": pipe.groups.pp_group, "replicas": pipe.groups.dp_group, "copies": pipe.groups.copies_group}
    params = [p for stage in pipe.stages.values() for p in stage.module.parameters()]
    parameter_bytes = sum(p.nbytes for p in params)
    return Rehearsal(
        pp_rank=pipe.position.pp_rank,
        dp_rank=pipe.position.dp_rank,
        program=pipe.program,
        channels={key: Sent(len(sizes), sum(sizes)) for key, sizes in recorder.traffic.items()},
        groups={name: len(group.ranks) for name, group in groups.items() if group is not None},
        num_communicators=len(pipe.groups),
        parameter_bytes=parameter_bytes,
        gradient_bytes=sum(p.numel() * main_dtype(p).itemsize for p in params),
        peak_saved_bytes=recorder.saved.live.peak_bytes,
        peak_buffer_bytes=recorder.buffers.peak_bytes,
        peak_bytes=parameter_bytes + recorder.peak_bytes,
        peak_at=recorder.peak_at,
    )


def differences(done: Rehearsal) -> list[str]:
    """Where a rehearsal differs from the program that was verified: the messages on each channel of the rank."""
    program, found = done.program, []
    for number in range(program.num_lanes):
        lane = program.lane(number)
        if lane.rank != done.pp_rank or lane.kind not in (LaneKind.SEND, LaneKind.RECV):
            continue
        channel = (lane.rank, lane.peer) if lane.kind is LaneKind.SEND else (lane.peer, lane.rank)
        planned = int(program.lane_ptr[number + 1] - program.lane_ptr[number])
        sent = done.channels[channel].num_messages if channel in done.channels else 0
        if sent != planned:
            found.append(f"channel {channel[0]}>{channel[1]}: {planned} messages in the program, {sent} in the step")
    return found
