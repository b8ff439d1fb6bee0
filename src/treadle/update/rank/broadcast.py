"""The process group of buckets: the ranks of an attempt make it, a failed one breaks it off, the next makes another."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from treadle.dist.backends import CPU, default_backend
from treadle.dist.communicators import JointAbort
from treadle.dist.device import device_of
from treadle.dist.groups import Group
from treadle.dist.native_sockets import Sockets
from treadle.dist.rank_world import RankWorld
from treadle.dist.streams import HOST_MEMORY
from treadle.host.errors import TreadleError
from treadle.update.rank.inbox import Inbox

MOST_PORTS = 8
"""Most ports that a rank's gloo listens at: one for each network interface."""


class BroadcastError(TreadleError, RuntimeError):
    """A collective failed or did not end. This rank cannot tell which rank is to blame."""


class Buckets(Group):
    """The group of the ranks of an attempt, over torch's own backend for the device, whatever backend the world has."""

    def __init__(
        self, name: str, ranks: Sequence[int], world: RankWorld, device: torch.device, deadline: timedelta
    ) -> None:
        wait, backend = device_of(device, deadline).wait, default_backend(device)
        place, store = list(ranks), world.store
        super().__init__(f"update/{name}", place, world.rank, deadline, wait, device, backend=backend, store=store)


class Waiter:
    """Waits for broadcasts in a thread, which is left behind where gloo never returns.

    Shutting gloo's connections ends a wait in it, but not always one that is just beginning.
    """

    def __init__(self, inbox: Inbox, deadline: timedelta) -> None:
        self._inbox, self._deadline = inbox, deadline
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: list[Exception | None] = []
        self.stuck = False
        self.void = False
        """The group was broken off: a wait that ends all the same, as NCCL's do then, has brought anything."""
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
        """Wait for a broadcast. Raises BroadcastError, or the bad news of the inbox, whatever gloo does."""
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
        if self.void:
            raise BroadcastError("a broadcast was aborted")

    def end(self) -> None:
        """End the thread."""
        self._works.put(None)


class Broadcasts:
    """One process group at a time. `break_off` ends waits in it from another thread.

    `name` is the updater's; `made` is the attempt that made the group, 0 where there is none that can be used; `cast`
    are the ranks of the present attempt.
    """

    def __init__(self, name: str, world: RankWorld, deadline_s: float) -> None:
        self.name, self.world, self.deadline = name, world, timedelta(seconds=deadline_s)
        self.device = HOST_MEMORY
        self.made = 0
        self.cast: tuple[int, ...] = tuple(range(world.size))
        self.waiter: Waiter | None = None
        self._group: Group | None = None
        self._sockets = Sockets()

    def group_of(self, epoch: int, inbox: Inbox) -> Group:
        """Return the group made by that attempt; all ranks ask for the same. Bad news ends the wait for it, too."""
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

    def make(self, what: str, device: torch.device | None = None) -> Buckets:
        """Make another group, of the updater's device if not given; all ranks make it under the same name."""
        device = device if device is not None else self.device
        return Buckets(f"{self.name}/{what}", self.cast, self.world, device, self.deadline)

    def make_control(self, what: str) -> Buckets:
        """Make another group for control messages, which are on the CPU whatever the buckets are on."""
        return self.make(what, CPU)

    def _make(self, epoch: int, made: list[Any]) -> None:
        try:
            sockets = Sockets()
            with sockets.recording():
                group = self.make(str(epoch))
            if self.device.type == "cpu":
                listening = torch.tensor([*sockets.ports, *[0] * MOST_PORTS][:MOST_PORTS], device=HOST_MEMORY)
                sockets.keep(torch.cat(group.all_gather(listening)).tolist())
            made.append((group, sockets))
        except Exception as error:  # raised in the thread that waits
            made.append(error)

    def break_off(self) -> None:
        """End all waits in the group, which then raise. The group cannot be used again."""
        self.made = 0
        waiter, group = self.waiter, self._group  # the thread that updates may drop them
        if waiter is not None:
            waiter.void = True
        self._sockets.shut()
        if group is not None:
            JointAbort([group.communicator])

    def drop(self) -> bool:
        """Forget the group. True where a wait in it goes on, which may still write to its buffer."""
        waiter, self.waiter, group, self._group = self.waiter, None, self._group, None
        usable, self.made = self.made != 0, 0
        if waiter is not None:
            waiter.end()
        self._sockets = Sockets()
        if group is not None and usable:  # an aborted communicator is not shut down: the call could hang
            group.close()
        return waiter is not None and waiter.stuck
