"""A rank's part of a Program at cell granularity: its list of instructions, run by one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from treadle.dist.device import Device, GpuLateError, Host, StreamDevice
from treadle.dist.errors import CommunicatorError
from treadle.dist.streams import Streams
from treadle.ir.ops import OpKind
from treadle.ir.program import Longs, Program
from treadle.runtime.faults.guard import Guard
from treadle.runtime.faults.progress.wait_target import ALL
from treadle.runtime.run.handlers import HANDLERS, Handler
from treadle.runtime.run.instructions import Instruction, instructions, post_early, walk, where
from treadle.runtime.run.own_error import LaunchRow
from treadle.runtime.run.ranges import labelled
from treadle.runtime.run.rank_program import RankProgram
from treadle.runtime.run.recorder import Recorder


class CellExecutor:
    """Runs a rank's ops at cell granularity. `listed` is the order of the first step, which learns the shapes."""

    def __init__(self, part: RankProgram, device: Device, handlers: Mapping[OpKind, Handler] = HANDLERS) -> None:
        self.program: Program = part.program
        self.rank = part.global_rank(part.pp_rank)
        self.device = device
        self.listed = self._told(instructions(part, handlers))
        self.recorder = self._first = Recorder(part.program, self.listed, device)
        self._known: Recorder | None = None
        """The list of steps whose shapes are known, on a CPU: its receives are posted early."""

    def run(self, guard: Guard) -> None:
        """Run a step."""
        self.recorder = recorder = self._known or self._first
        ends: list[Any] = []
        recorder.ends = ends
        try:
            walk(labelled(recorder.listed, self.program), guard.slots, self.device.now, ends)
            if isinstance(self.device, StreamDevice):
                self.device.streams.begin_op("")
            self.device.catch_up()
            guard.refuse_void()
        except Exception as error:
            failed = where(recorder.listed, ends)
            peer = failed.peer
            if isinstance(error, (GpuLateError, CommunicatorError)):  # the device may have waited at any op
                peer = guard.slots[1] = ALL
            row = LaunchRow(self.program, self.rank, list(dict.fromkeys(i.op for i in recorder.listed)))
            row.blame(guard, error, failed.op, peer)
        if self._known is None and isinstance(self.device, Host):
            self._known = Recorder(self.program, post_early(self.listed, self.program), self.device)

    def _told(self, listed: list[Instruction]) -> list[Instruction]:
        """Return the same list, with a device that reports on ops told which one begins."""
        if not isinstance(self.device, StreamDevice):
            return listed
        streams, op = self.device.streams, self.program.op
        return [i._replace(run=partial(_told_run, streams, str(op(i.op)), i.run)) for i in listed]

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        return self.recorder.times()

    def forget_shapes(self) -> None:
        """The next step runs `listed` again: its receives wait for headers."""
        self._known = None

    def close(self) -> None:
        """Nothing to give back."""


def _told_run(streams: Streams, told: str, run: Callable[[], None]) -> None:
    streams.begin_op(told)
    run()
