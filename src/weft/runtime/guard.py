"""A step under watch: what goes wrong in it is told to all ranks, and each of them raises the same loss.

An error of a stage's own is told to the others and goes on up as it is. An error of a wait is somebody else's fault, so
the watch finds out whose.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from weft.ir.program import Program
from weft.runtime.communicators import Communicators
from weft.runtime.executor import NOBODY, Instruction
from weft.runtime.watch import RankLost, Watch, waits_for_group

PIPE, REPLICAS = waits_for_group(0), waits_for_group(1)
"""Whom a collective waits for, in the order in which the watch knows the circles."""


class Guard:
    """A rank's watch, and its place in the program that others can see. Without a watch errors go on up.

    Numbers from the program's last op on stand for what is done behind the ops: agreeing on the loss, and so on.
    """

    AFTER = ("the agreement on the loss", "the trace")

    def __init__(self) -> None:
        self.program: Program | None = None
        self.watch: Watch | None = None
        self.slots = memoryview(array("q", [NOBODY] * 4))

    def join(self, talk: Communicators, deadline_s: float, device: torch.device, address: str | None) -> None:
        """Meets the other ranks; from here on their loss is noticed."""
        circles = [circle for circle in (talk.pipe, talk.replicas) if circle is not None]
        self.watch = Watch.join(
            circles, rank=talk.place.rank, name=self.name, deadline_s=deadline_s, device=device, address=address
        )
        self.watch.on_alarm(talk.break_off)
        self.slots = self.watch.slots

    def name(self, rank: int, op: int) -> str:
        """What an op number stands for; ops of all pipelines are numbered alike."""
        assert self.program is not None
        if op < self.program.num_ops:
            return str(self.program.op(op))
        return self.AFTER[op - self.program.num_ops]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """While a step runs others can see that it does. A loss that is known already is raised at once."""
        if self.watch is not None and self.watch.alarm is not None:
            raise self.watch.noticed()
        self.slots[2] = number
        try:
            yield
        finally:
            self.slots[0] = self.slots[1] = NOBODY

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around something that all ranks of a circle do together, one of `AFTER`."""
        assert self.program is not None
        self.slots[0] = self.program.num_ops + self.AFTER.index(what)
        self.slots[1] = PIPE
        try:
            yield
        except RuntimeError as error:
            if (loss := self.lost(error, what)) is error:
                raise
            raise loss from error

    def blame(self, error: Exception, at: Instruction) -> NoReturn:
        """Raises what an instruction's error comes to: itself, if it is a stage's own."""
        if at.peer == NOBODY and self.watch is not None:
            self.watch.raised(error)
        loss = self.lost(error, self.name(0, at.op)) if at.peer != NOBODY else error
        if loss is error:
            raise error
        raise loss from error

    def lost(self, error: Exception, waiting_for: str) -> Exception:
        """The loss behind an error of a wait."""
        if self.watch is None or isinstance(error, RankLost):
            return error
        return self.watch.failed(error, waiting_for)

    def close(self) -> None:
        """Says goodbye."""
        if self.watch is not None:
            self.watch.close()
