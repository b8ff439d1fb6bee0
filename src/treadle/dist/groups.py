"""Groups of ranks, made by their members only, with a deadline on every wait."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _get_default_store

from treadle.dist.backends import is_dry
from treadle.dist.calls import DifferentCallsError, contradiction
from treadle.dist.communicators import CLOSED, REDUCTION, Traffic, close_communicator, make_communicator
from treadle.dist.device import Wait
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.streams import HOST_MEMORY, streams_of


def next_name(position: MeshPosition) -> str:
    """Return a name for the next pipeline of a mesh. All ranks of the mesh make their pipelines in one order."""
    mesh = hashlib.sha1(repr(position.ranks).encode(), usedforsecurity=False).hexdigest()[:12]
    return f"{mesh}/{_get_default_store().add(f'treadle/{mesh}/made by {position.rank}', 1)}"


def control_wait(deadline: timedelta) -> Wait:
    """Return the wait of groups for control: it blocks, and raises after the deadline."""
    return methodcaller("wait", deadline)


class Group:
    """A group of ranks with their own communicator; `group_rank` is this rank's number in it.

    Its tensors are on `device`. Without one it is for control: tensors are on the CPU, and a wait blocks and raises.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        deadline: timedelta,
        wait: Wait,
        device: torch.device | None = None,
        *,
        traffic: Traffic = REDUCTION,
        backend: str | None = None,
        store: Store | None = None,
    ) -> None:
        self.ranks, self.group_rank, self.wait = ranks, ranks.index(rank), wait
        self.communicator = make_communicator(
            name, ranks, rank, deadline, device, traffic=traffic, backend=backend, store=store
        )
        self._is_gloo = (device is None or streams_of(device) is None) and not is_dry()
        self._announced: tuple[Tensor, dist.Work] | None = None

    def announce(self, call: int) -> None:
        """Launch the comparison of the calls that ranks begin (`dist.calls`). The next collective ends it first."""
        self.settle()
        if len(self.ranks) > 1:
            both = torch.tensor([call, -call], dtype=torch.int64, device=HOST_MEMORY)
            self._announced = both, self.launch_reduce(both, largest=True)

    def settle(self) -> None:
        """Wait for the comparison that was launched, if one was. Raises if ranks began different calls.

        What they exchange next would be of different sizes, which ends a process of gloo.
        """
        if self._announced is not None:
            (both, work), self._announced = self._announced, None
            self.wait(work)
            highest, lowest = both.tolist()
            reason = contradiction(highest, -lowest)
            if reason is not None:
                raise DifferentCallsError(reason)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of `ranks`."""
        gathered, work = self.launch_all_gather(tensor)
        self.wait(work)
        return gathered

    def launch_all_gather(self, tensor: Tensor) -> tuple[list[Tensor], dist.Work]:
        """Launch an all-gather; the caller waits for it, and then every rank's tensor is there."""
        self.settle()
        gathered = [tensor.clone() for _ in self.ranks]  # the fake backend writes nothing: all ranks look like this one
        return gathered, self.communicator.allgather([gathered], [tensor])

    def launch_gather_rows(self, row: Tensor) -> tuple[Tensor, dist.Work]:
        """Launch an all-gather into one tensor, [rank, *row.shape]; the caller waits for it."""
        self.settle()
        rows = row.new_empty(len(self.ranks), *row.shape)
        if is_dry():
            rows.copy_(row.expand_as(rows))  # the fake backend writes nothing: all ranks look like this one
        return rows, self.communicator._allgather_base(rows.flatten(0, 1), row)  # gloo compares shapes

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> None:
        """Replace the tensor by the sum over all ranks, or by the largest."""
        self.wait(self.launch_reduce(tensor, largest=largest))

    def launch_reduce(self, tensor: Tensor, *, largest: bool = False) -> dist.Work:
        """Launch an all-reduce; the caller waits for it."""
        self.settle()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return self.communicator.allreduce([tensor], options)

    def launch_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor | None, list[dist.Work]]:
        """Launch a reduce-scatter in place: of equal rows, one a rank, this rank's becomes the sum over all ranks.

        The caller waits for it. Where rows are returned, they are then to be added up: gloo's own reduce-scatter is an
        all-reduce of all rows, of twice the bytes (torch 2.13; benchmarks/gradients.py). Receives are posted first:
        else data that is sent is ahead of what asks for data, and one way waits for the other (1.6 times the time).
        """
        self.settle()
        rows = tensor.view(len(self.ranks), -1)
        own = rows[self.group_rank]
        if not self._is_gloo:
            return None, [self.communicator._reduce_scatter_base(own, tensor, dist.ReduceScatterOptions())]
        arrived = torch.empty_like(rows)
        arrived[self.group_rank].copy_(own)
        peers = [peer for peer in range(len(self.ranks)) if peer != self.group_rank]
        receives = [self.communicator.recv([arrived[peer]], peer, 0) for peer in peers]
        return arrived, [*receives, *(self.communicator.send([rows[peer]], peer, 0) for peer in peers)]

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send `send[r]` rows to each rank r and return `receive[r]` rows of each; either may be 0."""
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        self.wait(self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send))
        return arrived

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send to the rank with this number in the group."""
        self.wait(self.communicator.send([tensor], peer, 0))

    def recv(self, tensor: Tensor, peer: int) -> None:
        """Receives from the rank with this number in the group."""
        self.wait(self.communicator.recv([tensor], peer, 0))

    def close(self) -> None:
        """Close the communicator, even if others still refer to the group."""
        communicator, self.communicator = self.communicator, CLOSED
        self._announced = None  # its work would keep the communicator
        close_communicator(communicator)
