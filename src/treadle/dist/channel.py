"""One end of a channel: messages from one rank to another, in order, over a communicator of their own.

Messages have no tags: the k-th sent is the k-th received, and the verifier has checked that the two have the same
name. A receive's tensors are allocated when it is posted and belong to its reader; the Program says how many are
posted ahead. A sent tensor is kept alive until its send has ended, which is checked when a later message is sent.

Headers go beside the messages, from CPU to CPU over the group of the pipeline, with a tag of their own: the k-th header
sent between two ranks is the k-th received. So a receive of a header ends at its deadline whatever the device does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.dist.boundary import Boundary
from treadle.dist.communicators import CLOSED, Communicator, close_communicator
from treadle.dist.device import Wait
from treadle.dist.groups import Group
from treadle.dist.streams import HOST_MEMORY, keep

Posted: TypeAlias = tuple[tuple[Tensor, ...], list[dist.Work]]


_LEAVING = 4
"""Tensors that may be in flight at once, besides those of the last message, whose receive may not be posted yet."""

_SMALL_BYTES = 1 << 18
"""As long as fewer bytes are on their way the number does not matter: keeping them is cheaper than waiting."""


def most_in_flight(size_bytes: int) -> int:
    """Return how many messages of one tensor of this size a channel keeps alive at most, after their send.

    Example:
        >>> most_in_flight(1 << 20), most_in_flight(1 << 12)
        (4, 64)

    """
    return max(_LEAVING, _SMALL_BYTES // max(1, size_bytes))


HEADER_TAG = 1
"""The tag of headers; other messages of the pipeline's group have 0."""


@dataclass(frozen=True)
class Control:
    """Where a channel's headers go: a group of CPUs, and the number of the channel's peer in it."""

    group: Group
    peer: int


class _Leaving(NamedTuple):
    """A message in flight. Its tensors must not be written to until it has left; `versions` tell if they were."""

    told: str
    tensors: list[Tensor]
    versions: list[int]
    works: list[dist.Work]
    size_bytes: int


class Channel:
    """The communicator of one direction between this rank and a peer, whose number in it is `peer`.

    Its messages are made on `device`. Without `control` it has no headers.
    """

    def __init__(
        self, communicator: Communicator, peer: int, device: torch.device, wait: Wait, control: Control | None = None
    ) -> None:
        self.communicator, self.peer, self.device, self.wait = communicator, peer, device, wait
        self.control = control
        self.control_wait: Wait | None = control.group.wait if control is not None else None
        self._headers: deque[tuple[Tensor, dist.Work]] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._num_leaving = 0
        self._leaving_bytes = 0

    def send(self, tensors: Sequence[Tensor], told: str) -> None:
        """Launch a message, and wait for earlier ones so that few stay alive. Errors call the message `told`."""
        if not tensors:
            return
        sent, works, size_bytes = [], [], 0
        for tensor in tensors:
            keep(tensor)  # its memory may be another stream's
            whole = tensor.contiguous()
            sent.append(whole)
            works.append(self.communicator.send([whole], self.peer, 0))
            size_bytes += whole.nbytes
        self._leaving.append(_Leaving(told, sent, versions(sent), works, size_bytes))
        self._num_leaving += len(works)
        self._leaving_bytes += size_bytes
        while self._leaving_bytes > _SMALL_BYTES and self._num_leaving > _LEAVING and len(self._leaving) > 1:
            self._wait_for_oldest()

    def drain(self) -> None:
        """Wait until all messages have left."""
        while self._headers:
            assert self.control_wait is not None
            self.control_wait(self._headers[0][1])
            self._headers.popleft()
        while self._leaving:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        message = self._leaving.popleft()
        self._num_leaving -= len(message.works)
        self._leaving_bytes -= message.size_bytes
        for work in message.works:
            self.wait(work)
        refuse_reused(message.tensors, message.versions, message.told)

    def post(self, boundary: Boundary) -> Posted:
        """Launch the receive of a message into new tensors."""
        tensors = tuple([spec.empty(self.device) for spec in boundary])
        return tensors, [self.communicator.recv([tensor], self.peer, 0) for tensor in tensors]

    def wait_for(self, posted: Posted) -> tuple[Tensor, ...]:
        """Wait for a posted message and return its tensors."""
        tensors, works = posted
        for work in works:
            self.wait(work)
        return tensors

    def send_header(self, header: Tensor) -> None:
        """Launch the send of the header of a stage's messages to their reader."""
        assert self.control is not None
        work = self.control.group.communicator.send([header], self.control.peer, HEADER_TAG)
        self._headers.append((header, work))

    def receive_header(self, size: int) -> Tensor:
        """Return the header of `size` numbers that the peer sends before the first message of a stage."""
        assert self.control is not None
        assert self.control_wait is not None
        header = torch.empty(size, dtype=torch.int64, device=HOST_MEMORY)
        self.control_wait(self.control.group.communicator.recv([header], self.control.peer, HEADER_TAG))
        return header

    def close(self) -> None:
        """Close the communicator, and drop messages that did not leave."""
        communicator, self.communicator = self.communicator, CLOSED
        self._leaving.clear()
        self._headers.clear()
        close_communicator(communicator)


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return autograd's count of writes to each tensor's memory, which views of one storage share."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of a tensor of inference mode, which asking beforehand costs more than all else here
        return [tensor._version if not tensor.is_inference() else 0 for tensor in tensors]


def refuse_reused(tensors: Sequence[Tensor], before: Sequence[int], told: str) -> None:
    """Raise ValueError if a tensor was written to since it had the version `before`."""
    if versions(tensors) != before:
        raise ValueError(
            f"{told} was written to before it was sent on or read: the stage uses the memory of an output again, for "
            "another micro-batch; return a tensor of its own for each micro-batch, for example buffer.clone()"
        )
