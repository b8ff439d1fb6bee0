"""A step under watch: what goes wrong in it is told to all ranks, and each of them raises the same loss.

A rank's own error is told to the others and goes on up as it is. An error of a wait is somebody else's fault, so the
watch finds out whose.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch

from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.ir.program import Program
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY
from treadle.runtime.faults.watch import RankLostError, Watch


class Guard:
    """A rank's watch, and its place in the program that others can see. Without a watch errors go on up.

    Numbers from the program's last op on stand for what is done beside the ops: agreeing on the loss, and so on.
    """

    AFTER = ("the agreement on the loss", "the trace", "making the pipeline")

    def __init__(self) -> None:
        self.program: Program | None = None
        self.position: MeshPosition | None = None
        self.watch: Watch | None = None
        self.slots = memoryview(array("q", [NOBODY] * 4))
        self._agreed = False

    def join(self, groups: Groups, deadline_s: float, device: torch.device, address: str | None) -> None:
        """Meets the other ranks; from here on their loss is noticed."""
        self.position = groups.position
        rings = [group for group in (groups.pp_group, groups.reduce_group) if group is not None]
        pp_ranks, alike = groups.pp_group.ranks, groups.reduce_group.ranks if groups.reduce_group is not None else []
        ep_ranks = groups.ep_group.ranks if groups.ep_group is not None else []
        self.watch = Watch.join(
            rings,
            rank=groups.position.rank,
            name=self.name,
            deadline_s=deadline_s,
            device=device,
            address=address,
            waited=[alike, sorted({*pp_ranks, *alike, *ep_ranks})],  # in the order of ALIKE, ALL
        )
        self.watch.on_alarm(groups.break_off)
        self.slots = self.watch.slots

    def name(self, rank: int, op: int) -> str:
        """What an op number of a rank stands for; ops of all pipelines are numbered alike."""
        assert self.program is not None
        if op >= self.program.num_ops:
            return self.AFTER[op - self.program.num_ops]
        named = self.program.op(op)
        if self.position is not None and (named.kind.is_send or named.kind.is_recv):
            dp_rank = next(row.index(rank) for row in self.position.ranks if rank in row)
            peer = self.position.ranks[named.lane.peer][
                dp_rank
            ]  # in the world, where the program counts along the pipe
            named = replace(named, lane=replace(named.lane, peer=peer))
        return str(named)

    def raise_known(self) -> None:
        """Raises a loss that is known already."""
        if self.watch is not None and self.watch.alarm is not None:
            raise self.watch.noticed()

    @contextmanager
    def step(self, number: int, *, own_first: bool = False) -> Iterator[None]:
        """While a step runs others can see that it does. A loss that is known already is raised at once.

        `own_first`: not at once, but when the caller says `raise_known`, behind what may be wrong on this rank itself.
        """
        if not own_first:
            self.raise_known()
        self.slots[2] = number
        self._agreed = False
        try:
            yield
        except BaseException as error:  # an interrupt is no less a loss to the others
            if not self._agreed:  # else all ranks raise it, and none is lost
                self._tell(error)
            raise
        finally:
            self.slots[0] = self.slots[1] = NOBODY

    @contextmanager
    def making(self, *, all_refuse: bool = False) -> Iterator[None]:
        """Around what is left to do in making a pipeline: an error is told, and the watch is over.

        `all_refuse`: a ValueError is raised by all ranks, so it is no loss. Told, it would overtake a slow rank's own.
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
        """Around something that all ranks do together, one of `AFTER`."""
        assert self.program is not None
        self.slots[0] = self.program.num_ops + self.AFTER.index(what)
        self.slots[1] = ALL
        try:
            yield
        except Exception as error:
            self._raise(error, what)
        self._agreed = True

    def blame(self, error: Exception, op: int, peer: int) -> NoReturn:
        """Raises what an op's error comes to: itself, if it is this rank's own, as it waited for nobody."""
        if peer == NOBODY:
            raise error
        self._raise(error, self._name_own(op))

    def _raise(self, error: Exception, waiting_for: str) -> NoReturn:
        """Raises the loss behind an error of a wait."""
        if self.watch is None or not _of_a_wait(error):
            raise error
        raise self.watch.failed(error, waiting_for) from error

    def _name_own(self, op: int) -> str:
        return self.name(self.position.rank if self.position is not None else 0, op)

    def _tell(self, error: BaseException) -> None:
        if self.watch is not None:
            self.watch.raised(error)

    @property
    def is_lost(self) -> bool:
        """Has a rank been lost, as far as this one knows."""
        return self.watch is not None and self.watch.alarm is not None

    def close(self) -> None:
        """Says goodbye, and leaves the page that neighbours saw."""
        if self.watch is not None:
            self.watch.close()
            self.watch.slots = self.slots = memoryview(array("q", [NOBODY] * 4))


def _of_a_wait(error: Exception) -> bool:
    """Is it what waits raise. Memory that is not there is this rank's own trouble, wherever it comes to that."""
    own = isinstance(error, (RankLostError, torch.OutOfMemoryError))
    return isinstance(error, (RuntimeError, OSError)) and not own
