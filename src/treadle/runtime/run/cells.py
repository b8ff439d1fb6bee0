"""A rank's part of a Program at the grain of cells: its list of instructions, walked by one thread."""

from __future__ import annotations

from typing import Any

from treadle.dist.device import Device
from treadle.ir.program import Longs, Program
from treadle.runtime.faults.guard import Guard
from treadle.runtime.run.ops import RankProgram, instructions, walk, where
from treadle.runtime.run.recorder import Recorder


class CellExecutor:
    """The list, and what the last step noted of it."""

    def __init__(self, part: RankProgram, device: Device) -> None:
        self.program: Program = part.program
        self.listed = instructions(part)
        self.device = device
        self.recorder = Recorder(part.program, self.listed, device)

    def run(self, guard: Guard) -> None:
        """A step."""
        ends: list[Any] = []
        self.recorder.ends = ends
        try:
            walk(self.listed, guard.slots, self.device.now, ends)
            self.device.catch_up()
        except Exception as error:
            at = where(self.listed, ends)
            guard.blame(error, at.op, at.peer)

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        return self.recorder.times()

    def forget_shapes(self) -> None:
        """The list is the same whatever the shapes."""

    def close(self) -> None:
        """Nothing to give back."""
