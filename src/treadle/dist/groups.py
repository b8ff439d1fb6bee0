"""Groups of ranks, made by their members only, with a deadline on every wait.

Communicators are made from torch's backends directly: `new_group` must be called by the whole world, and with
`use_local_synchronization` it names a group by the number of groups its rank has, which differs along a pipe.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.device import Wait
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.streams import streams_of


class Communicator(Protocol):
    """The methods used of a communicator: torch's process groups and their backends both have them."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Launches a send."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Launches a receive."""
        ...

    def allreduce(self, tensors: list[Tensor], opts: Any = ..., /) -> dist.Work:
        """Launches a reduction."""
        ...

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = ..., /) -> dist.Work:
        """Launches an all-gather."""
        ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> dist.Work:
        """Launches an all-to-all of rows."""
        ...

    def abort(self) -> None:
        """Aborts pending communication, where the backend can."""
        ...

    def shutdown(self) -> None:
        """Ends the communicator, where the backend needs the call."""
        ...


def make_communicator(name: str, ranks: list[int], rank: int, deadline: timedelta) -> Communicator:
    """Makes a communicator of `ranks` with the backend of the world. All of them make it under the same name."""
    store, at = PrefixStore(f"treadle/{name}", _get_default_store()), ranks.index(rank)
    backend = dist.get_backend()
    if backend == "gloo":
        gloo: Communicator = dist.ProcessGroupGloo(store, at, len(ranks), deadline)  # type: ignore[assignment]
        streams = streams_of(torch.device("cpu"))
        return gloo if streams is None else streams.communicator(gloo, name)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        nccl: Communicator = dist.ProcessGroupNCCL(store, at, len(ranks), options)  # type: ignore[assignment]
        return nccl
    if backend == "fake":
        fake: Communicator = dist.new_group(ranks, timeout=deadline, use_local_synchronization=True)
        return fake
    raise ValueError(f"pipelines run on gloo or nccl, the process group's backend is {backend!r}")


def next_name(position: MeshPosition) -> str:
    """Returns a name for the next pipeline of a mesh. All ranks of the mesh make their pipelines in one order."""
    mesh = hashlib.sha1(repr(position.ranks).encode(), usedforsecurity=False).hexdigest()[:12]
    return f"{mesh}/{_get_default_store().add(f'treadle/{mesh}/made by {position.rank}', 1)}"


class ClosedCommunicator:
    """Replaces a closed communicator, so that nothing keeps the communicator itself alive."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} on a communicator that is closed; make a new Pipeline")


CLOSED: Communicator = ClosedCommunicator()


def close_communicator(communicator: Communicator) -> None:
    """Ends a backend's threads and memory. gloo ends them itself with the last reference."""
    if communicator is not CLOSED and dist.is_initialized() and dist.get_backend() == "nccl":
        communicator.shutdown()


class Group:
    """A group of ranks with their own communicator; `group_rank` is this rank's number in it."""

    def __init__(self, name: str, ranks: list[int], rank: int, deadline: timedelta, wait: Wait) -> None:
        self.ranks, self.group_rank, self.wait = ranks, ranks.index(rank), wait
        self.communicator = make_communicator(name, ranks, rank, deadline)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns every rank's tensor, in the order of `ranks`."""
        gathered = [tensor.clone() for _ in self.ranks]  # torch's fake backend writes nothing: all ranks look like this one
        self.wait(self.communicator.allgather([gathered], [tensor]))
        return gathered

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> None:
        """Replaces the tensor by the sum over all ranks, or by the largest."""
        self.wait(self.launch_reduce(tensor, largest=largest))

    def launch_reduce(self, tensor: Tensor, *, largest: bool = False) -> dist.Work:
        """Launches an all-reduce; the caller waits for it."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return self.communicator.allreduce([tensor], options)

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends `send[r]` rows to each rank r and returns `receive[r]` rows of each; either may be 0."""
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        self.wait(self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send))
        return arrived

    def send(self, tensor: Tensor, peer: int) -> None:
        """Sends to the rank with this number in the group."""
        self.wait(self.communicator.send([tensor], peer, 0))

    def recv(self, tensor: Tensor, peer: int) -> None:
        """Receives from the rank with this number in the group."""
        self.wait(self.communicator.recv([tensor], peer, 0))

    def close(self) -> None:
        """Closes the communicator, even if others still refer to the group."""
        communicator, self.communicator = self.communicator, CLOSED
        close_communicator(communicator)
