"""Communicators: made by their members only, used with a deadline.

They are made from torch's backends directly: `new_group` has to be called by the whole world, and with
`use_local_synchronization` names a group by how many its rank has already, which differs along a pipe.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.device import Wait
from treadle.dist.mesh_position import MeshPosition


class Communicator(Protocol):
    """What is used of a communicator: torch's process groups and their backends both have it."""

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
        """Launches a gathering."""
        ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> dist.Work:
        """Launches an exchange of rows."""
        ...

    def abort(self) -> None:
        """Gives up what is under way, where the backend can."""
        ...

    def shutdown(self) -> None:
        """Ends the communicator, where the backend has to be told."""
        ...


def make_communicator(name: str, ranks: list[int], rank: int, deadline: timedelta) -> Communicator:
    """A communicator of these ranks, who all make it under this name, with the backend of the world."""
    store, at = PrefixStore(f"treadle/{name}", _get_default_store()), ranks.index(rank)
    backend = dist.get_backend()
    if backend == "gloo":
        gloo: Communicator = dist.ProcessGroupGloo(store, at, len(ranks), deadline)  # type: ignore[assignment]
        return gloo
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
    """A name for the next thing that the ranks of a mesh make together; they make such things in the same order."""
    mesh = hashlib.sha1(repr(position.ranks).encode(), usedforsecurity=False).hexdigest()[:12]
    return f"{mesh}/{_get_default_store().add(f'treadle/{mesh}/made by {position.rank}', 1)}"


class ClosedCommunicator:
    """Stands where a communicator was, so that nothing keeps the communicator itself alive."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} on a communicator that is closed; make a new Pipeline")


CLOSED: Communicator = ClosedCommunicator()


def close_communicator(communicator: Communicator) -> None:
    """Ends what a backend keeps beside its sockets. gloo's ends with the last reference."""
    if communicator is not CLOSED and dist.is_initialized() and dist.get_backend() == "nccl":
        communicator.shutdown()


class Group:
    """Ranks that gather, reduce and exchange together."""

    def __init__(self, name: str, ranks: list[int], rank: int, deadline: timedelta, wait: Wait) -> None:
        self.ranks, self.group_rank, self.wait = ranks, ranks.index(rank), wait
        self.communicator = make_communicator(name, ranks, rank, deadline)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, in the order of `ranks`."""
        gathered = [tensor.clone() for _ in self.ranks]  # on torch's fake backend everyone looks like this rank
        self.wait(self.communicator.allgather([gathered], [tensor]))
        return gathered

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> None:
        """Everyone's sum, or the largest, in place."""
        self.wait(self.launch_reduce(tensor, largest=largest))

    def launch_reduce(self, tensor: Tensor, *, largest: bool = False) -> dist.Work:
        """As `all_reduce`, to be waited for by the caller."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return self.communicator.allreduce([tensor], options)

    def swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends `send[r]` rows to each rank r and takes `receive[r]` from it; either may be nothing."""
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
        """Gives the communicator back, whoever still holds the group."""
        communicator, self.communicator = self.communicator, CLOSED
        close_communicator(communicator)
