"""The executors of a rank, each made when a call first needs it, with what their runs have learned of shapes."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TypeAlias

from treadle.dist.boundary import Boundary
from treadle.dist.device import Device, StreamDevice
from treadle.ir.program import Longs, Op
from treadle.lowering.running import host_order
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.model.input_shapes import InputShapes
from treadle.runtime.pipeline_options import LanesName
from treadle.runtime.rank_part import RankPart
from treadle.runtime.run.lanes import Lanes, PacedLanes, SerialLanes, StreamLanes, ThreadLanes, VirtualLanes
from treadle.runtime.run.rank_program import RankProgram
from treadle.runtime.run.run_cells import CellExecutor
from treadle.runtime.run.run_layers import PACE, LayerExecutor
from treadle.runtime.run.unequal_shapes import UnequalCells
from treadle.runtime.step_plan import TimedProgram

Executor: TypeAlias = CellExecutor | LayerExecutor | UnequalCells


class RankExecutors:
    """The executors of a rank. Boundaries of evaluations are their own: their micro-batches may be of another size."""

    def __init__(self, part: RankPart) -> None:
        self._part, self._plan = part, part.agreed.plan
        for stage in part.stages.values():
            part.recipe.reset_shapes(stage)
        self._boundaries = part.recipe.known_inputs(part.stages)
        self._evaluated: dict[int, Boundary] = {}
        self._steps: dict[tuple[bool, bool], Executor] = {}
        self.input_shapes = InputShapes()

    def step(self, *, reduces: bool, gathers: bool = False) -> Executor:
        """Return the executor of a step that reduces gradients, or that gathers parameters first."""
        if (reduces, gathers) not in self._steps:
            planned = self._plan.variant(reduces=reduces, gathers=gathers)
            self._steps[reduces, gathers] = self._make(planned, self._part.stages, self._boundaries)
        return self._steps[reduces, gathers]

    @cached_property
    def evaluated_stages(self) -> dict[int, Chunk]:
        """The stages of evaluations."""
        return self._part.recipe.evaluating().build()

    @cached_property
    def evaluation(self) -> Executor:
        """The executor of an evaluation."""
        return self._make(self._plan.forwards(), self.evaluated_stages, self._evaluated)

    def forget_evaluated(self) -> None:
        """Let the next evaluation find out its own shapes."""
        self.evaluation.forget_shapes()
        self._evaluated.clear()
        for stage in self.evaluated_stages.values():
            stage.forget_shape()

    def close(self) -> None:
        """End the threads of all lanes."""
        made = [*self._steps.values(), *([self.__dict__.pop("evaluation")] if "evaluation" in self.__dict__ else [])]
        self._steps.clear()
        for executor in made:
            executor.close()

    def _make(self, planned: TimedProgram, stages: dict[int, Chunk], boundaries: dict[int, Boundary]) -> Executor:
        part, joined = self._part, self._part.joined
        ranks = RankProgram(
            planned.program,
            joined.position.pp_rank,
            stages,
            part.outgoing,
            part.incoming,
            part.gradients,
            joined.position.neighbour,
            part.parameters,
            boundaries,
        )
        on_lanes = partial(self._on_lanes, ranks, planned.ticks)
        if self._plan.shape is not None:
            return on_lanes(joined.options.lanes)
        cells = CellExecutor(ranks, joined.waits, part.handlers)
        if joined.options.shapes == "same" or isinstance(joined.waits, StreamDevice):
            return cells
        return UnequalCells(ranks, cells, partial(on_lanes, "thread"))

    def _on_lanes(self, ranks: RankProgram, ticks: Longs, lanes: LanesName) -> LayerExecutor:
        joined = self._part.joined
        by_start = isinstance(joined.waits, StreamDevice)
        order = host_order(ranks.program, ticks, by_start=by_start)[ranks.pp_rank]
        make = partial(make_lanes, lanes, joined.waits, ticks, joined.options.deadline_s)
        return LayerExecutor(ranks, order, make, self._part.handlers)


def make_lanes(
    name: LanesName, device: Device, ticks: Longs, deadline_s: float, lanes: list[str], ops: list[Op]
) -> Lanes:
    """Return what ops of layers run on. `lanes` are their names; the first computes."""
    num_lanes = len(lanes)
    dur_ns = [int(ticks[op.index]) for op in ops]
    if isinstance(device, StreamDevice):
        return StreamLanes(lanes, [str(op) for op in ops], device)
    if name == "paced":
        pace, kind = [PACE[op.lane.kind] for op in ops], [op.kind for op in ops]
        return PacedLanes(num_lanes, dur_ns, pace, kind, deadline_s)
    if name == "virtual":
        return VirtualLanes(num_lanes, dur_ns)
    if name == "thread":
        return ThreadLanes(num_lanes, len(ops), deadline_s)
    if name == "serial":
        return SerialLanes(len(ops))
    raise ValueError(f"lanes are thread, paced, serial or virtual, got {name!r}")
