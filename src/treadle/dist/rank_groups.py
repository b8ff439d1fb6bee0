"""All communicators of a rank: one for each channel's direction, and groups for reductions and agreement.

There are few, as each takes memory on a GPU. Each is made by its members only, in one order over the whole Program, so
that making them cannot deadlock and its cost does not grow with the world. Each is used by one lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from treadle.ir.program import LaneKind, Program
from treadle.dist.channel import Channel
from treadle.dist.device import Wait
from treadle.dist.groups import Group, Communicator, make_communicator
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.native_sockets import Sockets

MOST = 8
"""The most communicators a rank may have."""


@dataclass
class Groups:
    """All groups and channels of a rank. `pp_group` is its pipeline, `dp_group` the ranks at its position in others.

    Where micro-batches enter at both ends, `copies_group`, the ranks with the same stages, replaces `dp_group`.
    Gradients are reduced over either, those of experts over `expert_dp_group`; `ep_group` is the expert group. These,
    and the channels, are made once the Program is known. `name` tells this pipeline from others of the world.
    """

    name: str
    position: MeshPosition
    deadline: timedelta
    wait: Wait
    pp_group: Group
    dp_group: Group | None
    copies_group: Group | None = None
    ep_group: Group | None = None
    expert_dp_group: Group | None = None
    outgoing: Mapping[int, Channel] = field(default_factory=dict)
    incoming: Mapping[int, Channel] = field(default_factory=dict)
    sockets: Sockets = field(default_factory=Sockets)

    @classmethod
    def make(cls, name: str, position: MeshPosition, deadline: timedelta, wait: Wait) -> Groups:
        """Makes the groups that exist before the Program: along pp, and along dp if there are replicas."""
        sockets, dp_group = Sockets(), None
        with sockets.recording():
            pp_group = Group(f"{name}/pp/{position.dp_rank}", position.pp_ranks, position.rank, deadline, wait)
            if position.dp > 1:
                dp_group = Group(f"{name}/dp/{position.pp_rank}", position.dp_ranks, position.rank, deadline, wait)
        return cls(name, position, deadline, wait, pp_group, dp_group, sockets=sockets)

    def connect(self, program: Program, device: torch.device) -> None:
        """Makes the rank's channels and further groups, in the order of the channels, which is the same on all ranks."""
        position, own = self.position, _own_channels(program, self.position.pp_rank)
        two_ended = program.layout.placement.num_pipes > 1
        alike = position.with_same_experts(two_ended=two_ended) if position.ep > 1 else []
        num = len(self) + len(own) + (position.ep > 1) + (len(alike) > 1) + (two_ended and self.dp_group is None)
        if num > MOST:
            raise ValueError(
                f"rank {position.rank} would need {num} communicators, {MOST} is the most: it has {len(own)} channels; "
                "place neighbouring stages so that each rank talks to fewer others"
            )
        with self.sockets.recording():
            self._make_channels(own, device)
            if two_ended:
                name = f"{self.name}/copies/{min(position.copies_ranks)}"
                self.copies_group = Group(name, position.copies_ranks, position.rank, self.deadline, self.wait)
                self.dp_group = None
            if position.ep > 1:
                name = f"{self.name}/ep/{position.ep_ranks[0]}"
                self.ep_group = Group(name, position.ep_ranks, position.rank, self.deadline, self.wait)
            if len(alike) > 1:
                self.expert_dp_group = Group(f"{self.name}/expert_dp/{alike[0]}", alike, position.rank, self.deadline, self.wait)

    def _make_channels(self, own: list[tuple[int, int]], device: torch.device) -> None:
        position = self.position
        sides: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}
        for src, dst in own:
            side, peer = (sides[0], dst) if src == position.pp_rank else (sides[1], src)
            ranks = sorted((position.rank, position.neighbour(peer)))
            communicator = make_communicator(f"{self.name}/{position.dp_rank}/{src}>{dst}", ranks, position.rank, self.deadline)
            side[peer] = Channel(communicator, ranks.index(position.neighbour(peer)), device, self.wait)
        self.outgoing, self.incoming = sides

    @property
    def reduce_group(self) -> Group | None:
        """The group over which gradients are reduced, or None."""
        return self.copies_group if self.copies_group is not None else self.dp_group

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators of all channels and groups."""
        channels = [channel.communicator for side in (self.outgoing, self.incoming) for channel in side.values()]
        groups = (self.pp_group, self.dp_group, self.copies_group, self.ep_group, self.expert_dp_group)
        return channels + [group.communicator for group in groups if group is not None]

    def __len__(self) -> int:
        return len(self.communicators)

    def close(self) -> None:
        """Closes all communicators: their connections, threads and memory."""
        for channel in (*self.outgoing.values(), *self.incoming.values()):
            channel.close()
        for group in (self.pp_group, self.dp_group, self.copies_group, self.ep_group, self.expert_dp_group):
            if group is not None:
                group.close()

    def break_off(self) -> None:
        """Ends the wait of any thread on these communicators; the wait raises."""
        self.sockets.shut()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            for communicator in self.communicators:
                communicator.abort()


def _own_channels(program: Program, pp_rank: int) -> list[tuple[int, int]]:
    """Returns (from, to) of each channel of a rank, in the order of all channels."""
    sends = program.lane_kind == LaneKind.SEND
    ends = zip(program.lane_rank[sends].tolist(), program.lane_peer[sends].tolist(), strict=True)
    return sorted(channel for channel in ends if pp_rank in channel)
