"""One end of a channel: what one rank sends another, in order, over a communicator of their own.

Nothing depends on tags: the k-th message sent is the k-th received, and the verifier has seen that these have the
same name. A receive's tensors are made when it is posted and belong to its reader; how many are posted ahead the
Program says. A sent tensor stays alive until its send has ended, which is asked when a later message leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from weft.runtime.boundary import HEADER_SIZE, Boundary, from_header
from weft.runtime.device import Wait
from weft.runtime.groups import Group

Posted: TypeAlias = tuple[tuple[Tensor, ...], list[dist.Work]]


_LEAVING = 4
"""Tensors that may be on their way at once: the next send waits for the one before the last, which has its receive."""


class Channel:
    """The communicator of one direction between this rank and a peer, who has `place` in it.

    Its messages are made on `device`.
    """

    def __init__(self, group: Group, place: int, device: torch.device, wait: Wait) -> None:
        self.group, self.place, self.device, self.wait = group, place, device, wait
        self._leaving: deque[dist.Work] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Launches a message; waits for one that left some messages before, so that few stay alive."""
        leaving = self._leaving
        for tensor in tensors:
            leaving.append(self.group.send([tensor.contiguous()], self.place, 0))
        while len(leaving) > _LEAVING:
            self.wait(leaving.popleft())

    def drain(self) -> None:
        """Waits until everything sent has left."""
        while self._leaving:
            self.wait(self._leaving.popleft())

    def post(self, boundary: Boundary) -> Posted:
        """Launches the receive of a message."""
        tensors = tuple([spec.empty(self.device) for spec in boundary])
        return tensors, [self.group.recv([tensor], self.place, 0) for tensor in tensors]

    def wait_for(self, posted: Posted) -> tuple[Tensor, ...]:
        """The message, once it is there."""
        tensors, works = posted
        for work in works:
            self.wait(work)
        return tensors

    def send_header(self, header: Tensor) -> None:
        """Tells the reader what the messages of a stage will be like."""
        self.send([header.to(self.device)])

    def receive_header(self) -> Boundary:
        """What the messages of a stage will be like."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.device)
        self.wait(self.group.recv([header], self.place, 0))
        return from_header(header)
