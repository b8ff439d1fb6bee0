"""The communicator of buckets: made by all update ranks, broken off when an attempt fails, and made again then."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.device import device_of
from treadle.dist.groups import Group
from treadle.dist.native_sockets import Sockets
from treadle.host.errors import TreadleError
from treadle.update.rank.inbox import Inbox

MOST_PORTS = 8
"""At most so many does a rank's gloo listen at: one for each of its interfaces."""


class BroadcastError(TreadleError, RuntimeError):
    """What was done together with the other ranks did not end, or not well; who is to blame, this rank cannot tell."""


class Buckets(Group):
    """All update ranks, over the backend of their devices, whatever the world's groups are made of."""

    def __init__(self, name: str, rank: int, world: int, device: torch.device, deadline: timedelta) -> None:
        store = PrefixStore(f"treadle/update/{name}", _get_default_store())
        self.ranks, self.group_rank = list(range(world)), rank
        self.wait = device_of(device, deadline).wait
        made: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline
            made = dist.ProcessGroupNCCL(store, rank, world, options)
        else:
            made = dist.ProcessGroupGloo(store, rank, world, deadline)
        self.communicator = made


class Waiter:
    """Waits for broadcasts in a thread of its own, which is left behind where gloo does not come back.

    A connection that is shut ends a wait in gloo, but not always one that is just being begun.
    """

    def __init__(self, inbox: Inbox, deadline: timedelta) -> None:
        self._inbox, self._deadline = inbox, deadline
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: list[Exception | None] = []
        self.stuck = False
        threading.Thread(target=self._run, name="treadle broadcasts", daemon=True).start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                work.wait(self._deadline)
                ended = None
            except Exception as error:  # raised in the thread that updates
                ended = error
            del work
            self._ended.append(ended)
            self._inbox.stir()

    def wait(self, work: Any) -> None:
        """Until the broadcast is done. Raises Broken, or the bad news, whatever gloo does."""
        self._ended.clear()
        self._works.put(work)
        self.stuck = True
        self._inbox.until(lambda: bool(self._ended), self._deadline.total_seconds() + 1)
        self.stuck = not self._ended
        if self.stuck:
            raise BroadcastError("a broadcast neither ended nor failed within its deadline")
        ended = self._ended[0]
        if ended is not None:
            raise BroadcastError(f"a broadcast broke off: {ended}") from ended

    def end(self) -> None:
        """Nothing more is to be waited for."""
        self._works.put(None)


class Broadcasts:
    """One communicator at a time. `break_off` ends waits in it from another thread.

    `name` is the updater's; `made` the attempt that made the communicator, 0 if there is none that can be used.
    """

    def __init__(self, name: str, rank: int, world: int, deadline_s: float, device: torch.device) -> None:
        self.name, self.rank, self.world, self.deadline = name, rank, world, timedelta(seconds=deadline_s)
        self.device = device
        self.made = 0
        self.waiter: Waiter | None = None
        self._group: Group | None = None
        self._sockets = Sockets()

    def group_of(self, epoch: int, inbox: Inbox) -> Group:
        """The communicator of that attempt; all ranks ask alike. Meeting can be broken off by bad news, too."""
        if self._group is None or self.made != epoch:
            self.drop()
            made: list[Any] = []
            thread = threading.Thread(target=self._make, args=(epoch, made), name="treadle meeting", daemon=True)
            thread.start()
            until = time.monotonic() + self.deadline.total_seconds()
            while thread.is_alive() and inbox.bad is None and time.monotonic() < until:
                thread.join(0.01)
            if inbox.bad is not None:
                raise inbox.bad
            if not made:
                raise BroadcastError(f"the update ranks have not met within {self.deadline.total_seconds():g} s")
            if isinstance(made[0], Exception):
                raise BroadcastError(f"the update ranks did not meet: {made[0]}") from made[0]
            self._group, self._sockets = made[0]
            self.made = epoch
            self.waiter = Waiter(inbox, self.deadline)
        return self._group

    def make(self, what: str) -> Buckets:
        """A communicator of its own; all ranks make it under this name."""
        return Buckets(f"{self.name}/{what}", self.rank, self.world, self.device, self.deadline)

    def _make(self, epoch: int, made: list[Any]) -> None:
        try:
            sockets = Sockets()
            with sockets.recording():
                group = self.make(str(epoch))
            if self.device.type == "cpu":
                listening = torch.tensor([*sockets.ports, *[0] * MOST_PORTS][:MOST_PORTS])
                sockets.keep(torch.cat(group.all_gather(listening)).tolist())
            made.append((group, sockets))
        except Exception as error:  # raised in the thread that waits
            made.append(error)

    def break_off(self) -> None:
        """Whoever waits in it raises; it cannot be used again."""
        self.made = 0
        self._sockets.shut()
        if self._group is not None and self.device.type == "cuda":
            self._group.communicator.abort()

    def drop(self) -> bool:
        """The next attempt makes a new one. True where a wait in the old one goes on, with the buffer it was for."""
        waiter, self.waiter, self._group, self.made = self.waiter, None, None, 0
        if waiter is not None:
            waiter.end()
        self._sockets = Sockets()
        return waiter is not None and waiter.stuck
