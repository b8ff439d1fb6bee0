"""A rank of a world that is not there: its part is built on torch's fake backend with meta tensors, and runs a step.

Everything a rank does happens, modules, autograd, messages, reductions, but for the numbers and the other ranks. What
it says about messages, communicators and memory is counted from what the step did, not from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from treadle.ir.program import LaneKind, Program
from treadle.runtime.model.stage import Stage
from treadle.runtime.model.weight_grad import AddGradient
from treadle.runtime.pipeline import Pipeline


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

    `gradient_bytes` is what gradients take while they are summed, `peak_saved_bytes` what forwards left for backwards.
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


class _Meter:
    """Bytes that are there now, under keys, and the most there were."""

    def __init__(self) -> None:
        self.peak = 0
        self._held: dict[Any, int] = {}

    def hold(self, key: Any, size: int) -> None:
        """Some more under this key."""
        self._held[key] = self._held.get(key, 0) + size
        self.peak = max(self.peak, sum(self._held.values()))

    def free(self, key: Any) -> None:
        """All that is under this key goes."""
        self._held.pop(key, None)


def rehearse(schedule: Schedule, world: int, rank: int, toy: Toy) -> Rehearsal:
    """Runs a step as rank `rank` of a world of `world`. Makes the default process group, and takes it away again."""
    pp = schedule.pp
    if world % pp or world < 1:
        raise ValueError(f"pipelines of {pp} ranks fill a world of {pp}, {2 * pp}, ... ranks, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"a world of {world} has the ranks 0 to {world - 1}, got {rank}")
    dist.init_process_group("fake", rank=rank, world_size=world, store=HashStore())
    try:
        mesh = init_device_mesh("cpu", (pp, world // pp), mesh_dim_names=("pp", "dp"))
        stages = {chunk: toy.stage() for chunk in range(schedule.vpp)}
        known = dict.fromkeys(range(schedule.placement.num_stages - 1), toy.boundary)
        pipe = Pipeline(stages, schedule, mesh=mesh, loss_fn=_loss, boundaries=known, seed=None)
        return _run(pipe, toy)
    finally:
        dist.destroy_process_group()


def _loss(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean()


def _run(pipe: Pipeline, toy: Toy) -> Rehearsal:
    saved, buffers = _Meter(), _Meter()
    for chunk, stage in pipe.stages.items():
        assert isinstance(stage, Stage)
        _meter_stage(stage, chunk, saved)
    traffic: dict[tuple[int, int], list[int]] = {}
    here = pipe.position.pp_rank
    for peer, channel in pipe.groups.outgoing.items():
        _meter_sends(channel, traffic.setdefault((here, peer), []))
    for peer, channel in pipe.groups.incoming.items():
        _meter_receives(channel, traffic.setdefault((peer, here), []), buffers)
    batch = [toy.microbatch() for _ in range(pipe.schedule.num_microbatches)]
    pipe.step(batch, batch)
    groups = {"pipe": pipe.groups.pp_group, "replicas": pipe.groups.dp_group, "copies": pipe.groups.copies_group}
    params = [p for module in pipe.stages.values() for p in module.module.parameters()]
    return Rehearsal(
        pp_rank=here,
        dp_rank=pipe.position.dp_rank,
        program=pipe.program,
        channels={key: Sent(len(sizes), sum(sizes)) for key, sizes in traffic.items()},
        groups={name: len(group.ranks) for name, group in groups.items() if group is not None},
        num_communicators=len(pipe.groups),
        parameter_bytes=sum(p.nbytes for p in params),
        gradient_bytes=sum(p.numel() * max(4, p.itemsize) for p in params if p.grad is not None),
        peak_saved_bytes=saved.peak,
        peak_buffer_bytes=buffers.peak,
    )


def _meter_stage(stage: Stage, chunk: int, meter: _Meter) -> None:
    """Counts what autograd saves of a forward until its backward, and what weight halves hold until they run."""
    own = {p.untyped_storage()._cdata for p in stage.module.parameters()}
    forward, backward, input_half, weight_half = stage.forward, stage.backward, stage.input_half, stage.weight_half

    def metered_forward(mb: int) -> None:
        seen = set(own)

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                meter.hold((chunk, mb), storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(mb)

    def metered_backward(mb: int) -> None:
        backward(mb)
        meter.free((chunk, mb))

    def metered_input_half(mb: int) -> None:
        input_half(mb)  # runs `backward`, which gives up what was saved
        meter.hold((chunk, mb), sum(half.size_bytes for half in stage.halves_of(mb)))

    def metered_weight_half(mb: int, add: AddGradient) -> None:
        weight_half(mb, add)
        meter.free((chunk, mb))

    stage.forward, stage.backward = metered_forward, metered_backward  # type: ignore[method-assign]
    stage.input_half, stage.weight_half = metered_input_half, metered_weight_half  # type: ignore[method-assign]


def _meter_sends(channel: Channel, sizes: list[int]) -> None:
    send = channel.send

    def metered(tensors: Sequence[Tensor], told: str) -> None:
        sizes.append(sum(t.nbytes for t in tensors))
        send(tensors, told)

    channel.send = metered  # type: ignore[method-assign]


def _meter_receives(channel: Channel, sizes: list[int], meter: _Meter) -> None:
    """A buffer is one until its reader has it; from then on it is what a forward saved."""
    post, wait_for = channel.post, channel.wait_for

    def metered_post(boundary: Boundary) -> Posted:
        posted = post(boundary)
        sizes.append(sum(t.nbytes for t in posted[0]))
        meter.hold(id(posted[1]), sizes[-1])
        return posted

    def metered_wait_for(posted: Posted) -> tuple[Tensor, ...]:
        meter.free(id(posted[1]))
        return wait_for(posted)

    channel.post, channel.wait_for = metered_post, metered_wait_for  # type: ignore[method-assign]


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
