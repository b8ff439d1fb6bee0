"""The executors of a rank, one for each kind of step, made when a call first needs it, and the lanes they run on."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Literal

from treadle.dist.boundary import Boundary
from treadle.dist.device import Device, StreamDevice
from treadle.ir.ops import LaneKind
from treadle.ir.program import Longs, Op
from treadle.lowering.running import host_order
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.model.input_shapes import InputShapes
from treadle.runtime.pipeline_options import LanesName
from treadle.runtime.rank_part import RankPart
from treadle.runtime.run.executor import Executor
from treadle.runtime.run.lanes import Lanes, PacedLanes, SerialLanes, StreamLanes, ThreadLanes, VirtualLanes
from treadle.runtime.run.lanes.paced import Pace
from treadle.runtime.run.rank_program import RankProgram
from treadle.runtime.step_plan import TimedProgram

PACE = {
    LaneKind.COMPUTE: Pace.AFTER,
    LaneKind.SEND: Pace.BEFORE,
    LaneKind.RECV: Pace.NONE,
    LaneKind.EP: Pace.TOGETHER,
    LaneKind.OUT: Pace.AFTER,
    LaneKind.IN: Pace.AFTER,
    LaneKind.DP: Pace.TOGETHER,
    LaneKind.TIED: Pace.TOGETHER,
    LaneKind.HOST: Pace.AFTER,
}
"""How ops of a lane take their time where they are paced."""


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
        device, lanes = joined.waits, joined.options.lanes
        on_host, whole = not isinstance(device, StreamDevice), self._plan.shape is not None
        order = host_order(ranks.program, planned.ticks, by_start=whole and not on_host)[ranks.pp_rank]
        make = partial(make_lanes, device=device, ticks=planned.ticks, deadline_s=joined.options.deadline_s)
        if whole:
            return Executor(ranks, order, partial(make, lanes if on_host else "stream"), part.handlers)
        unequal = partial(make, "thread") if on_host and joined.options.shapes != "same" else None
        serial = partial(make, "serial")
        return Executor(ranks, order, serial, part.handlers, parts=True, early=on_host, make_unequal=unequal)


def make_lanes(
    name: LanesName | Literal["stream"],
    lanes: list[str],
    ops: list[Op],
    *,
    device: Device,
    ticks: Longs,
    deadline_s: float,
) -> Lanes:
    """Return what ops run on. `lanes` are the names of lanes; the first computes."""
    num_lanes = len(lanes)
    dur_ns = [int(ticks[op.index]) for op in ops]
    if name == "stream":
        assert isinstance(device, StreamDevice)
        return StreamLanes(lanes, list(map(str, ops)), device)
    if name == "paced":
        pace, kind = [PACE[op.lane.kind] for op in ops], [op.kind for op in ops]
        return PacedLanes(num_lanes, dur_ns, pace, kind, deadline_s)
    if name == "virtual":
        return VirtualLanes(num_lanes, dur_ns)
    if name == "thread":
        return ThreadLanes(num_lanes, len(ops), deadline_s)
    if name == "serial":
        return SerialLanes(ops, device)
    raise ValueError(f"lanes are thread, paced, serial or virtual, got {name!r}")
