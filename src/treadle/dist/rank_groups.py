"""All communicators of a rank: one for each channel's direction, groups for reductions, and groups for control.

There are few, as each takes memory on a GPU. Each is made and connected by its members only, in one order over the
whole Program, so that making them cannot deadlock and its cost does not grow with the world. Each is used by one lane.

Control is what ranks tell each other about a step: the handshake, headers, the agreement on the loss, clocks. It goes
from CPU to CPU over gloo, where a wait blocks, has a deadline and raises, on any device. Where the stages are on the
CPU, replicas reduce over the group that they agree over.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from treadle.dist.backends import FAKE, GLOO, backend_of
from treadle.dist.channel import Channel, Control
from treadle.dist.communicators import CHANNEL, EXCHANGE, Communicator, JointAbort, error_of, make_communicator
from treadle.dist.device import Wait
from treadle.dist.errors import CommunicatorError
from treadle.dist.groups import Group, control_wait
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.native_sockets import Sockets
from treadle.dist.streams import streams_of
from treadle.ir.ops import LaneKind
from treadle.ir.program import Program

MANY = 8
"""Communicators of a rank on its device, above which a warning names their memory."""

ABORT_S = 10.0
"""How long `close` waits for communicators to be aborted. After that it leaves them to the end of the process."""


@dataclass(frozen=True)
class CommunicatorNeeds:
    """The communicators that a rank needs on its device.

    `channels` are (from, to), `tied` the ranks of each of its ties, `alike` those with its experts, [] without others.
    """

    channels: list[tuple[int, int]]
    tied: dict[int, list[int]]
    alike: list[int]
    num_groups: int

    @classmethod
    def of(cls, program: Program, position: MeshPosition) -> CommunicatorNeeds:
        """Return the needs of the rank at this position."""
        two_ended = program.layout.placement.num_pipes > 1
        alike = position.with_same_experts(two_ended=two_ended) if position.ep > 1 else []
        tied = _tied_ranks(program, position)
        num_groups = (two_ended or position.dp > 1) + (position.ep > 1) + (len(alike) > 1) + len(tied)
        return cls(_own_channels(program, position.pp_rank), tied, alike, num_groups)

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.channels) + self.num_groups


def warn_of_many(needs: CommunicatorNeeds, device: torch.device, rank: int) -> None:
    """Warn where this rank's communicators take much of a device's memory; those of a CPU take little."""
    if needs.num > MANY and streams_of(device) is not None:
        ties, fewer = (f" and {len(needs.tied)} ties", ", or tie fewer parameters") if needs.tied else ("", "")
        warnings.warn(
            f"rank {rank} makes {needs.num} communicators on {device}, each with buffers and threads of its own: it "
            f"has {len(needs.channels)} channels{ties}; place neighbouring stages so that each rank talks to fewer "
            f"others{fewer}",
            stacklevel=2,
        )


@dataclass
class Groups:
    """All groups and channels of a rank. `pp_group` is its pipeline, `dp_group` the ranks at its position in others.

    Where micro-batches enter at both ends, `copies_group`, the ranks with the same stages, replaces `dp_group`. These
    three are for control. Gradients are reduced over `reduce_group`, those of experts over `expert_dp_group`;
    `ep_group` is the expert group, `tied_groups[n]` the ranks that hold tie n of the Program, each used by that
    tie's lane. These, and the channels, are made once the Program is known. `name` tells this pipeline from
    others of the world.
    """

    name: str
    position: MeshPosition
    deadline: timedelta
    pp_group: Group
    dp_group: Group | None
    copies_group: Group | None = None
    reduce_group: Group | None = None
    ep_group: Group | None = None
    expert_dp_group: Group | None = None
    tied_groups: Mapping[int, Group] = field(default_factory=dict)
    outgoing: Mapping[int, Channel] = field(default_factory=dict)
    incoming: Mapping[int, Channel] = field(default_factory=dict)
    sockets: Sockets = field(default_factory=Sockets)
    _abort: JointAbort | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(cls, name: str, position: MeshPosition, deadline: timedelta) -> Groups:
        """Make the groups that exist before the Program: along pp, and along dp if there are replicas."""
        sockets, dp_group, wait = Sockets(), None, control_wait(deadline)
        with sockets.recording():
            pp_group = Group(f"{name}/pp/{position.dp_rank}", position.pp_ranks, position.rank, deadline, wait)
            if position.dp > 1:
                dp_group = Group(f"{name}/dp/{position.pp_rank}", position.dp_ranks, position.rank, deadline, wait)
        return cls(name, position, deadline, pp_group, dp_group, sockets=sockets)

    def connect(self, program: Program, device: torch.device, wait: Wait) -> None:
        """Make the rank's channels and further groups, in the order of the channels, which is the same on all ranks.

        `wait` is that of the device.
        """
        position = self.position
        mine = CommunicatorNeeds.of(program, position)
        warn_of_many(mine, device, position.rank)
        own, tied, alike = mine.channels, mine.tied, mine.alike
        two_ended = program.layout.placement.num_pipes > 1
        with self._recording(device):
            self._make_channels(own, device, wait)
        if two_ended:
            with self.sockets.recording():
                name, ranks = f"{self.name}/copies/{min(position.copies_ranks)}", position.copies_ranks
                self.copies_group = Group(name, ranks, position.rank, self.deadline, control_wait(self.deadline))
                self.dp_group = None
        with self._recording(device):
            self.reduce_group = self._make_reduce_group(device, wait)
            if position.ep > 1:
                name, ranks = f"{self.name}/ep/{position.ep_ranks[0]}", position.ep_ranks
                self.ep_group = Group(name, ranks, position.rank, self.deadline, wait, device, traffic=EXCHANGE)
            if len(alike) > 1:
                name = f"{self.name}/expert_dp/{alike[0]}"
                self.expert_dp_group = Group(name, alike, position.rank, self.deadline, wait, device)
            self.tied_groups = {
                number: Group(f"{self.name}/tied/{number}", ranks, position.rank, self.deadline, wait, device)
                for number, ranks in tied.items()
            }

    def _recording(self, device: torch.device) -> AbstractContextManager[None]:
        """Record the sockets of gloo: other backends are aborted, and their sockets are not Treadle's to shut."""
        return self.sockets.recording() if backend_of(device) == GLOO else nullcontext()

    def _make_channels(self, own: list[tuple[int, int]], device: torch.device, wait: Wait) -> None:
        position = self.position
        sides: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}
        for src, dst in own:
            side, peer = (sides[0], dst) if src == position.pp_rank else (sides[1], src)
            ranks = sorted((position.rank, position.neighbour(peer)))
            name = f"{self.name}/{position.dp_rank}/{src}>{dst}"
            communicator = make_communicator(name, ranks, position.rank, self.deadline, device, traffic=CHANNEL)
            number = ranks.index(position.neighbour(peer))
            side[peer] = Channel(communicator, number, device, wait, Control(self.pp_group, peer))
        self.outgoing, self.incoming = sides

    def _make_reduce_group(self, device: torch.device, wait: Wait) -> Group | None:
        """Return the group that replicas agree over if the device's waits are like the CPU's, else one more."""
        control = self.replica_group
        if control is None or streams_of(device) is None or backend_of(device) == FAKE:
            return control
        name = f"{self.name}/reduce/{min(control.ranks)}"
        return Group(name, control.ranks, self.position.rank, self.deadline, wait, device)

    @property
    def replica_group(self) -> Group | None:
        """The group for control between the ranks that reduce gradients, or None."""
        return self.copies_group if self.copies_group is not None else self.dp_group

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators of all channels and groups, each once."""
        channels = [channel.communicator for side in (self.outgoing, self.incoming) for channel in side.values()]
        return channels + [group.communicator for group in self._groups()]

    def _groups(self) -> list[Group]:
        groups = (
            self.pp_group,
            self.dp_group,
            self.copies_group,
            self.reduce_group,
            self.ep_group,
            self.expert_dp_group,
            *self.tied_groups.values(),
        )
        return list({id(group): group for group in groups if group is not None}.values())

    def __len__(self) -> int:
        return len(self.communicators)

    def refuse_errors(self) -> None:
        """Raise CommunicatorError if a communicator has met an error that its waits have not raised."""
        for communicator in self.communicators:
            error = error_of(communicator)
            if error is not None:
                rank = self.position.rank
                raise CommunicatorError(f"Connection closed: a communicator of rank {rank} reports {error}")

    def close(self) -> None:
        """Close all communicators: their connections, threads and memory."""
        if self._abort is not None and not self._abort.ended(ABORT_S):
            return  # a call on a communicator that is being aborted would hang too
        me = self.position.pp_rank
        ends = {(me, peer): channel for peer, channel in self.outgoing.items()}
        ends |= {(peer, me): channel for peer, channel in self.incoming.items()}
        for end in sorted(ends):  # one order on all ranks, as they were made: a shutdown may wait for its peers'
            ends[end].close()
        for group in self._groups():
            group.close()

    @property
    def is_broken_off(self) -> bool:
        """True once a rank is lost: nothing that waits for others ends any more."""
        return self._abort is not None

    def break_off(self) -> None:
        """End the wait of any thread on these communicators. Host waits raise; what a device computed is void.

        Returns at once: communicators of a device are aborted in a thread.
        """
        self.sockets.shut()
        with self._lock:  # the watch's thread and the caller's may come together
            if self._abort is None:
                self._abort = JointAbort(self.communicators)


def _own_channels(program: Program, pp_rank: int) -> list[tuple[int, int]]:
    """Return (from, to) of each channel of a rank, in the order of all channels."""
    sends = program.lane_kind == LaneKind.SEND
    ends = zip(program.lane_rank[sends].tolist(), program.lane_peer[sends].tolist(), strict=True)
    return sorted(channel for channel in ends if pp_rank in channel)


def _tied_ranks(program: Program, position: MeshPosition) -> dict[int, list[int]]:
    """Return the ranks that hold each tie of a rank, by the tie's number, where others hold it too."""
    placement, found = program.layout.placement, {}
    for number, tie in enumerate(program.layout.tied):
        holders = placement.ranks_of(tie)
        ranks = position.in_all_pipelines(holders)
        if position.pp_rank in holders and len(ranks) > 1:
            found[number] = ranks
    return found
