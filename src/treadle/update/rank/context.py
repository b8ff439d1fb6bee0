"""What an update rank keeps from one attempt to the next: its connections, process group, plans and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from treadle.update.protocol.control import Asked
from treadle.update.rank.broadcast import Broadcasts
from treadle.update.rank.committed_share import CommittedShare
from treadle.update.rank.coordinator_client import CoordinatorClient
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.lease_keeper import LeaseKeeper
from treadle.update.rank.plans import Plans
from treadle.update.rank.rank_buffers import RankBuffers
from treadle.update.rank.source import WeightSource
from treadle.update.rank.worker_client import WorkerClient
from treadle.update.update_options import UpdateOptions

HOST_BYTES = 1 << 30
"""Buffer memory of a rank without a GPU, where the options name none."""

DEVICE_BYTES = 2 << 30
"""The most that buffers take of a GPU, and of an engine's copies there, where the options name none."""


@dataclass(frozen=True)
class UpdateRequest:
    """What is asked of an attempt, the same on all ranks; this rank's weights; the number of the call it answers."""

    asked: Asked
    source: WeightSource | None = None
    call: int = 0


@dataclass
class RankContext:
    """One update rank between attempts. `Updater` makes it, `AttemptRun` uses it.

    `directory` has the workers' sockets; `own_worker` is the connection to this rank's, if it has one. `say` is called
    with a line for people before something costly happens, `progress` with bytes moved so far and bytes in all.
    `given`: the device that the caller wants for buffers, None for any.
    """

    rank: int
    directory: Path
    options: UpdateOptions
    given: torch.device | None
    inbox: Inbox
    coordinator: CoordinatorClient
    own_worker: WorkerClient | None
    plans: Plans
    broadcasts: Broadcasts
    buffers: RankBuffers
    say: Callable[[str], None]
    progress: Callable[[int, int], None]
    compare_turn: int | None = None
    """Which blocks the last comparison of sources looked at. Starts at the first attempt's number, so that a restarted
    process goes on with other blocks."""
    keeper: LeaseKeeper | None = None
    """Of the worker's lease, where leases end."""
    sick_until_s: float = 0.0
    """Until when this rank leaves its worker out, as an attempt failed by it (monotonic)."""
    why_sick: str = ""
    was_away: bool = False
    """Whether the last attempt left the worker out."""
    share: CommittedShare = field(default_factory=CommittedShare)

    @property
    def worker(self) -> WorkerClient:
        """The connection to this rank's worker, for ranks that have one."""
        assert self.own_worker is not None
        return self.own_worker

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.buffers.device

    def use(self, device: torch.device) -> None:
        """Have the buffers of this attempt, and its process group, on a device."""
        if device != self.device:
            self.buffers.free()
            self.buffers, self.broadcasts.device = RankBuffers(device), device

    @property
    def is_measured(self) -> bool:
        """True where buffers get what the device has free. All that takes memory there besides must exist before."""
        return self.options.memory is None and self.buffers.free_bytes is not None

    @property
    def free_bytes(self) -> int:
        """Bytes for buffers on this rank's device."""
        if self.options.memory is not None:
            return min(self.options.memory.free)
        free = self.buffers.free_bytes
        return min(free, DEVICE_BYTES) if free is not None else HOST_BYTES
