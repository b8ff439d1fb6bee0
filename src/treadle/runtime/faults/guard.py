"""Steps under watch: errors are reported to all ranks, and every other rank raises the same loss.

A rank's own error is reported and raised unchanged. The error of a wait is another rank's fault; the watch finds out
which, and that loss is raised instead.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar
from weakref import WeakMethod

import torch

from treadle.dist.calls import TOGETHER, DifferentCallsError
from treadle.dist.errors import OWN_ERRORS
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.ir.program import Program
from treadle.runtime.faults.arrivals import Arrivals
from treadle.runtime.faults.progress.device_progress import DeviceProgress
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY
from treadle.runtime.faults.uncaught import UncaughtErrors
from treadle.runtime.faults.watch import RankLostError, Watch

T = TypeVar("T")

_NO_OP = 1 << 40
"""The op number of the first of TOGETHER, beyond those of any Program."""

_LOOK_S = 0.05
"""How often a wait for a native call looks for a loss."""

_COME_OUT_S = 1.0
"""How long a native call may take to notice a loss itself."""


class Guard:
    """A rank's watch and the progress that it shows to others. Without a watch, errors are raised unchanged.

    Op numbers from `_NO_OP` on stand for what ranks do TOGETHER.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self.device_progress: DeviceProgress | None = None
        self.position: MeshPosition | None = None
        self.watch: Watch | None = None
        self.slots = memoryview(array("q", [NOBODY] * 4))
        self._agreed = False
        self._told = False
        self._groups: Groups | None = None
        self._uncaught: UncaughtErrors | None = None

    def join(self, arrivals: Arrivals, position: MeshPosition, deadline_s: float, address: str | None) -> None:
        """Connects the watches of all ranks; from now on the loss of a rank is noticed."""
        self.position = position
        everyone = sorted({*position.pp_ranks, *position.dp_ranks})
        arrivals.deadline_s = deadline_s
        self.watch = Watch.join(
            arrivals.rings,
            arrivals.arrive,
            rank=position.rank,
            name=self.name,
            deadline_s=deadline_s,
            address=address,
            waited=[position.dp_ranks, everyone, [], []],  # in the order of ALIKE, ALL, TIED, EXPERTS
            meeting=arrivals.refuse_lone_meeting,
        )
        self.slots = self.watch.slots
        self._uncaught = UncaughtErrors(WeakMethod(self._tell))

    def break_off_on_alarm(self, groups: Groups) -> None:
        """Has the waits on these communicators ended when a rank is lost."""
        self._groups = groups
        if self.watch is not None:
            self.watch.on_alarm(groups.break_off)

    def connected(self, groups: Groups) -> None:
        """Takes the ranks that ops wait for, now that all groups are made."""
        pp_ranks, alike = groups.pp_group.ranks, groups.replica_group.ranks if groups.replica_group is not None else []
        ep_ranks = groups.ep_group.ranks if groups.ep_group is not None else []
        tied = sorted({rank for group in groups.tied_groups.values() for rank in group.ranks})
        if self.watch is not None:
            self.watch.wait_for([alike, sorted({*pp_ranks, *alike, *ep_ranks, *tied}), tied, ep_ranks])

    def unless_lost(self, make: Callable[[], T]) -> T:
        """Returns `make()`, which may block in native code that nothing ends before its deadline: a loss is raised.

        The call runs in a thread, which a loss may leave behind.
        """
        if self.watch is None:
            return make()
        made: list[T] = []
        errors: list[BaseException] = []
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                made.append(make())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="treadle connect", daemon=True)
        thread.start()
        while thread.is_alive() and self.watch.alarm is None:
            thread.join(_LOOK_S)
        thread.join(_COME_OUT_S)
        if thread.is_alive() or errors:
            self.raise_known()
        if errors:
            raise errors[0]
        return made[0]

    def name(self, rank: int, op: int) -> str:
        """Returns the text of an op number of a rank. All pipelines number their ops alike."""
        if op >= _NO_OP:
            return TOGETHER[op - _NO_OP]
        assert self.program is not None
        named = self.program.op(op)
        if self.position is not None and (named.kind.is_send or named.kind.is_recv):
            dp_rank = next(row.index(rank) for row in self.position.ranks if rank in row)
            peer = self.position.ranks[named.lane.peer][dp_rank]  # its number in the world, not along the pipe
            named = replace(named, lane=replace(named.lane, peer=peer))
        return str(named)

    def raise_known(self) -> None:
        """Raises the loss if one is known, or this rank's own error has made it one."""
        if self.watch is None:
            return
        if self._told:
            self.watch.await_alarm()
        if self.watch.alarm is not None:
            raise self.watch.noticed()

    def refuse_void(self) -> None:
        """Raises if what this rank has computed is void: a rank is lost, or a communicator has met an error.

        Communicators of a device are aborted on alarm. What waits for them there goes on then, with any numbers.
        """
        self.raise_known()
        if self._groups is not None:
            self._groups.refuse_errors()

    def look(self) -> None:
        """Shows others the op at which the device is, and the ranks it waits for there."""
        if self.device_progress is not None:
            self.device_progress.look()

    @contextmanager
    def step(self, number: int, *, own_first: bool = False) -> Iterator[None]:
        """Wraps a step and shows it to others. Raises a known loss before the step.

        `own_first`: the caller checks this rank's own input first, and then calls `raise_known` itself.
        """
        if not own_first:
            self.raise_known()
        self.slots[2] = number
        self._agreed = False
        try:
            yield
        except BaseException as error:  # also an interrupt: the others lose this rank
            if not self._agreed:  # else all ranks raise the error, and none is lost
                self._tell(error)
            raise
        finally:
            self.slots[0] = self.slots[1] = NOBODY

    @contextmanager
    def making(self, *, all_refuse: bool = False) -> Iterator[None]:
        """Wraps the rest of making a pipeline: reports an error to all ranks and closes the watch.

        `all_refuse`: all ranks raise a ValueError themselves, so it is not reported: a report could overtake a slow
        rank's own error.
        """
        try:
            with self.step(-1), self.together("making the pipeline"):
                try:
                    yield
                except ValueError:
                    self._agreed = all_refuse
                    raise
        except BaseException:
            self.close()
            raise

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Wraps an activity that all ranks do together, one of TOGETHER. What is raised after it, all of them raise."""
        self.slots[0] = _NO_OP + TOGETHER.index(what)
        self.slots[1] = ALL
        try:
            yield
            self.refuse_void()
        except Exception as error:
            self._raise(error, what)
        self._agreed = True

    def resume(self) -> None:
        """Goes on with a step after ranks have agreed on something: errors are a rank's own again."""
        self._agreed = False

    def blame(self, error: Exception, op: int, peer: int) -> NoReturn:
        """Raises the loss behind an op's error, or the error itself if the op waited for no other rank."""
        if peer == NOBODY:
            raise error
        self._raise(error, self._name_own(op))

    def _raise(self, error: Exception, waiting_for: str) -> NoReturn:
        """Raises the loss behind the error of a wait, or the error itself if it is this rank's own."""
        if isinstance(error, DifferentCallsError):
            self.refuse_void()  # what ranks compare over a communicator that was aborted is any number
        if self.watch is None or not _of_a_wait(error):
            raise error
        raise self.watch.failed(error, waiting_for) from error

    def _name_own(self, op: int) -> str:
        return self.name(self.position.rank if self.position is not None else 0, op)

    def _tell(self, error: BaseException) -> None:
        if self.watch is not None and not self._is_alone and not self._told:  # alone it is lost to nobody
            self.watch.raised(error)
            self._told = True

    @property
    def _is_alone(self) -> bool:
        return self.position is not None and sum(map(len, self.position.ranks)) == 1

    @property
    def is_lost(self) -> bool:
        """True once this rank knows that a rank is lost, or has reported an error of its own to others."""
        return self.watch is not None and (self._told or self.watch.alarm is not None)

    def close(self) -> None:
        """Closes the watch with a goodbye; later writes to `slots` are not seen by others."""
        if self.watch is not None:
            if self._uncaught is not None:
                self._uncaught.close()
            self.watch.close()
            self.watch.slots = self.slots = memoryview(array("q", [NOBODY] * 4))
        self._groups = None


def _of_a_wait(error: Exception) -> bool:
    """True for errors raised by a failed wait. Errors of the device are always this rank's own fault."""
    own = isinstance(error, (RankLostError, *OWN_ERRORS))
    return isinstance(error, (RuntimeError, OSError)) and not own
