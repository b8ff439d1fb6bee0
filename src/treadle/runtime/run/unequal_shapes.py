"""Cells of micro-batches whose shapes may differ, on a CPU.

While all have one shape, one thread does everything and posts receives ahead. In a step where they differ, a receive
cannot be posted before its header is there. One thread that waited for headers would not compute meanwhile, and if it
looked for them only when it reads a message, a peer could wait for room in vain. So receives, sends and reductions run
on lanes then, each in a thread of its own, as at the grain of layers: a receive is posted as soon as its header has
come and the Program lets it, whatever this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.ir.program import Longs
from treadle.runtime.faults.guard import Guard
from treadle.runtime.run.rank_program import RankProgram
from treadle.runtime.run.run_cells import CellExecutor
from treadle.runtime.run.run_layers import LayerExecutor


class UnequalCells:
    """Runs a step on `cells`, or on the lanes that `make_lanes` makes if its micro-batches differ in shape."""

    def __init__(self, part: RankProgram, cells: CellExecutor, make_lanes: Callable[[], LayerExecutor]) -> None:
        self.program, self._part = part.program, part
        self._cells, self._make_lanes = cells, make_lanes
        self._lanes: LayerExecutor | None = None
        self._last: CellExecutor | LayerExecutor = cells

    def run(self, guard: Guard) -> None:
        """Run a step."""
        self._last = self._on_lanes() if self._part.differ else self._cells
        self._last.run(guard)

    def _on_lanes(self) -> LayerExecutor:
        if self._lanes is None:
            self._lanes = self._make_lanes()
        return self._lanes

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        return self._last.times()

    def forget_shapes(self) -> None:
        """The next step finds out shapes again."""
        self._cells.forget_shapes()

    def close(self) -> None:
        """Ends the threads of the lanes."""
        if self._lanes is not None:
            self._lanes.close()
