"""Recordings made of predicted runs: what a reader would find in a profile of one."""

from __future__ import annotations

import numpy as np

import treadle
from treadle.ir import Schedule
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.trace import Trace
from treadle.passes.cells import lower_cells
from treadle.passes.mesh import spread
from treadle.profiles.recording import UNKNOWN, Mark, RankRecording, Recording

COSTS = treadle.load_costs("unit")
NS = 1_000_000


def traced(schedule: Schedule, dp: int = 1) -> Trace:
    """A prediction; a unit of its costs is taken for a millisecond."""
    return treadle.simulate(spread(lower_cells(schedule), ep=1, dp=dp), COSTS)


def recorded(
    trace: Trace,
    *,
    steps: int = 1,
    names: tuple[str, ...] = ("mb", "stage", "step"),
    messages: bool = True,
    offsets: dict[int, int] | None = None,
) -> Recording:
    """The recording of a run that did the same `steps` times; `names` are what its marks name."""
    program, unit = trace.program, NS // trace.clock.ticks
    placement, dp = program.layout.placement, program.layout.dp
    ranks = []
    for rank in range(program.num_ranks):
        marks = []
        for index in np.flatnonzero(program.lane_rank[program.lane_of] == rank):
            op = program.op(int(index))
            if op.lane.kind is not LaneKind.COMPUTE and not messages:
                continue
            stage = placement.stages[op.lane.peer // dp if op.kind.is_send else rank // dp][op.chunk]
            if op.kind.is_send:
                stage += -1 if op.kind is OpKind.SEND_F else 1
            for step in range(steps):
                shift = step * (trace.makespan + 5 * trace.clock.ticks)
                marks.append(
                    Mark(
                        op.kind,
                        int((trace.start[index] + shift) * unit) + (offsets or {}).get(rank, 0),
                        int((trace.end[index] + shift) * unit) + (offsets or {}).get(rank, 0),
                        op.mb if "mb" in names else UNKNOWN,
                        stage if "stage" in names else UNKNOWN,
                        op.chunk if "chunk" in names and not op.kind.is_send else UNKNOWN,
                        step=step if "step" in names else UNKNOWN,
                        joined=bool(program.joined[index]),
                    )
                )
        source = f"rank{rank}.json"
        ranks.append(RankRecording.of(marks, source=source, clock="one", rank=rank))
    return Recording("made", tuple(ranks), dp=dp if dp > 1 else None)
