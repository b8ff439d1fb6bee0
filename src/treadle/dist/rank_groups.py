"""All communicators of a rank: one for each channel's direction, and circles for reductions and agreement.

Few, as each takes memory on a GPU, and each made by its members only, in one order over the whole Program, so that
making them neither blocks nor grows with the world. Each is used by one lane.
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
"""Communicators a rank may have."""


@dataclass
class Groups:
    """What a rank talks through. `pipe` are the ranks of its pipeline, `replicas` those of its place in others.

    Where micro-batches enter at both ends, `copies` take the place of `replicas`: the ranks with the same stages.
    Gradients meet at either, those of experts at `experts`; `party` is the expert group. These, and channels, are made
    once the Program is known. `name` tells this pipeline's from another's.
    """

    name: str
    place: MeshPosition
    deadline: timedelta
    wait: Wait
    pipe: Group
    replicas: Group | None
    copies: Group | None = None
    party: Group | None = None
    experts: Group | None = None
    outgoing: Mapping[int, Channel] = field(default_factory=dict)
    incoming: Mapping[int, Channel] = field(default_factory=dict)
    sockets: Sockets = field(default_factory=Sockets)

    @classmethod
    def make(cls, name: str, place: MeshPosition, deadline: timedelta, wait: Wait) -> Groups:
        """The circles in which ranks can meet."""
        sockets, replicas = Sockets(), None
        with sockets.recording():
            pipe = Group(f"{name}/pipe/{place.dp_rank}", place.pipe, place.rank, deadline, wait)
            if place.dp > 1:
                replicas = Group(f"{name}/replicas/{place.pp_rank}", place.replicas, place.rank, deadline, wait)
        return cls(name, place, deadline, wait, pipe, replicas, sockets=sockets)

    def connect(self, program: Program, device: torch.device) -> None:
        """Makes the rank's channels. Ranks meet pair by pair, in the order of the channels, the same for all."""
        place, own = self.place, _own_channels(program, self.place.pp_rank)
        two_ended = program.layout.placement.num_pipes > 1
        alike = place.with_same_experts(two_ended=two_ended) if place.ep > 1 else []
        num = len(self) + len(own) + (place.ep > 1) + (len(alike) > 1) + (two_ended and self.replicas is None)
        if num > MOST:
            raise ValueError(
                f"rank {place.rank} would need {num} communicators, {MOST} is the most: it has {len(own)} channels; "
                "place neighbouring stages so that each rank talks to fewer others"
            )
        with self.sockets.recording():
            self._make_channels(own, device)
            if two_ended:
                name = f"{self.name}/copies/{min(place.copies)}"
                self.copies = Group(name, place.copies, place.rank, self.deadline, self.wait)
                self.replicas = None
            if place.ep > 1:
                name = f"{self.name}/party/{place.party[0]}"
                self.party = Group(name, place.party, place.rank, self.deadline, self.wait)
            if len(alike) > 1:
                self.experts = Group(f"{self.name}/experts/{alike[0]}", alike, place.rank, self.deadline, self.wait)

    def _make_channels(self, own: list[tuple[int, int]], device: torch.device) -> None:
        place = self.place
        sides: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}
        for src, dst in own:
            side, peer = (sides[0], dst) if src == place.pp_rank else (sides[1], src)
            ranks = sorted((place.rank, place.neighbour(peer)))
            group = make_communicator(f"{self.name}/{place.dp_rank}/{src}>{dst}", ranks, place.rank, self.deadline)
            side[peer] = Channel(group, ranks.index(place.neighbour(peer)), device, self.wait)
        self.outgoing, self.incoming = sides

    @property
    def reduce(self) -> Group | None:
        """Where gradients meet, if they have to."""
        return self.copies if self.copies is not None else self.replicas

    @property
    def groups(self) -> list[Communicator]:
        """All of them."""
        channels = [channel.group for side in (self.outgoing, self.incoming) for channel in side.values()]
        circles = (self.pipe, self.replicas, self.copies, self.party, self.experts)
        return channels + [circle.group for circle in circles if circle is not None]

    def __len__(self) -> int:
        return len(self.groups)

    def close(self) -> None:
        """Gives all communicators back: their connections, threads and memory."""
        for channel in (*self.outgoing.values(), *self.incoming.values()):
            channel.close()
        for circle in (self.pipe, self.replicas, self.copies, self.party, self.experts):
            if circle is not None:
                circle.close()

    def break_off(self) -> None:
        """Gets a thread that waits on any of them out of its wait, which then raises."""
        self.sockets.shut()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            for group in self.groups:
                group.abort()


def _own_channels(program: Program, pp_rank: int) -> list[tuple[int, int]]:
    """(from, to) of each channel of a rank, in the order of all channels."""
    sends = program.lane_kind == LaneKind.SEND
    ends = zip(program.lane_rank[sends].tolist(), program.lane_peer[sends].tolist(), strict=True)
    return sorted(channel for channel in ends if pp_rank in channel)
