"""What a schedule is run as: the shape of its stages, and the verified Programs of its steps and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treadle.costs import Costs, durations
from treadle.ir import Schedule
from treadle.ir.ops import BLOCK_FORWARD, WEIGHTS, OpKind
from treadle.ir.program import Longs, Program
from treadle.lowering.options import LoweringOptions
from treadle.lowering.running import expected, forward_only, join_halves, lower_running, lower_weaving
from treadle.passes.step_end import Buckets
from treadle.runtime.handshake import Handshake
from treadle.runtime.model.segments import COMPUTE
from treadle.runtime.pipeline_options import RunOptions
from treadle.verifier import verify_program, verify_schedule


class TimedProgram(NamedTuple):
    """A verified Program, and the ticks under which its ops are ordered."""

    program: Program
    ticks: Longs


class StepEnds(NamedTuple):
    """What a step's Program has besides the cells of its schedule, as `treadle.passes.step_end` takes it.

    `tied` are the stages of each tie, `buckets` the first blocks of each stage's buckets.
    """

    reduce: bool = False
    gather: bool = False
    tied: tuple[tuple[int, ...], ...] = ()
    buckets: Buckets = ()


@dataclass(frozen=True)
class StepPlan:
    """What a schedule is run as. `shape` is how it is lowered to layers, None where layers do not name their segments.

    `schedule` has whole backwards where a module cannot split them. `depths` are the layers of each stage of the model.
    """

    schedule: Schedule
    shape: LoweringOptions | None
    depths: tuple[int, ...]
    costs: Costs
    ends: StepEnds
    step: TimedProgram

    @classmethod
    def of(
        cls, schedule: Schedule, met: Handshake, options: RunOptions, *, reduce: bool, tied: tuple[tuple[int, ...], ...]
    ) -> StepPlan:
        """Return the plan of a schedule for stages that have met. `tied` are the stages of each tie."""
        schedule = join_halves(schedule, [place for place, can in met.splits.items() if not can])
        shape = shape_of(met, schedule, options)
        ends = StepEnds(reduce=reduce, tied=tied)
        step = plan(schedule, shape, options.costs, ends)
        return cls(schedule, shape, _depths(met, schedule), options.costs, ends, step)

    def by_bucket(self, buckets: Buckets) -> StepPlan:
        """Return the plan of steps that reduce gradients, and gather parameters, by these buckets."""
        ends = self.ends._replace(gather=self.ends.reduce, buckets=buckets if self.ends.reduce else ())
        return replace(self, ends=ends, step=plan(self.schedule, self.shape, self.costs, ends))

    def by_costs(self, costs: Costs) -> StepPlan:
        """Return the plan of the same steps, whose ops are ordered by these costs; only layers are."""
        return replace(self, costs=costs, step=plan(self.schedule, self.shape, costs, self.ends))

    def variant(self, *, reduces: bool, gathers: bool) -> TimedProgram:
        """Return the step that leaves each rank its share of the gradient, or finds parameters whole."""
        if reduces and gathers == self.ends.gather:
            return self.step
        ends = self.ends._replace(gather=gathers)
        return plan(self.schedule, self.shape, self.costs, ends if reduces else ends._replace(reduce=False, tied=()))

    def forwards(self) -> TimedProgram:
        """Return what an evaluation runs."""
        return plan_forward(self.schedule, self.shape, self.costs, self.step.program)

    def reduce_order(self, pp_rank: int) -> list[int]:
        """Return the rank's chunks in the order in which their gradients are reduced."""
        program = self.step.program
        mine = (program.kind == OpKind.REDUCE_GRAD) & (program.lane_rank[program.lane_of] == pp_rank)
        return [int(chunk) for chunk in program.chunk[mine]]


def shape_of(met: Handshake, schedule: Schedule, options: RunOptions) -> LoweringOptions | None:
    """Return how the schedule is lowered to layers, if these name their segments; else None."""
    saved, again = options.saved, options.recompute
    if saved not in ("leave", "count", "offload"):
        raise ValueError(f"saved is leave, count or offload, got {saved!r}")
    if isinstance(again, str) or set(again) - set(COMPUTE) or len(set(again)) != len(again):
        raise ValueError(f'recompute is a tuple of some of attn and mlp, each once, got {again!r}; say ("attn", "mlp")')
    if not met.layered:
        for name, given in (("saved", saved if saved != "leave" else None), ("recompute", again or None)):
            if given is not None:
                raise ValueError(
                    f"{name}={given!r} works layer by layer, and the stages' layers do not name their segments"
                )
        return None
    rows = _rows(met, schedule)
    return LoweringOptions(
        blocks=rows if met.segments else tuple(row.replace("d", "t") for row in rows),
        by_layer=True,
        moe=bool(met.segments),
        padded="counts" not in met.segments,
        split=WEIGHTS if any(met.splits.values()) else (),  # of the others such an op finds nothing deferred
        offload=saved == "offload",
        recompute=again,
    )


def forwards_of(shape: LoweringOptions | None) -> LoweringOptions | None:
    """Return the shape of an evaluation: nothing is split, moved or recomputed for a backward."""
    return replace(shape, split=(), offload=False, recompute=()) if shape is not None else None


def _rows(met: Handshake, schedule: Schedule) -> tuple[str, ...]:
    """Return the blocks of each stage of the model."""
    placement = schedule.placement
    return tuple(met.blocks[placement.holder(stage)] for stage in range(placement.num_stages))


def _depths(met: Handshake, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of layers of each stage of the model, by which layers are seeded."""
    if met.layered:
        return tuple(sum(letter in "dt" for letter in row) for row in _rows(met, schedule))
    placement = schedule.placement
    return tuple(met.layers[placement.holder(stage)] for stage in range(placement.num_stages))


def plan(
    schedule: Schedule,
    shape: LoweringOptions | None,
    costs: Costs,
    ends: StepEnds,
) -> TimedProgram:
    """Return the Program of a step, verified."""
    report = verify_schedule(schedule)
    if not report.clean:
        raise ValueError(f"the schedule is not sound: {report.findings[0]}; 'treadle verify' shows it all")
    if shape is None:
        program = lower_running(schedule, **ends._asdict())
        ticks = expected(program)
    else:
        program = lower_weaving(schedule, costs, shape, **ends._asdict())
        ticks = durations(program, costs)
    report = verify_program(program, ticks)
    if not report.clean:
        raise ValueError(f"the program of this schedule is not sound: {report.findings[0]}")
    return TimedProgram(program, ticks)


def plan_forward(schedule: Schedule, shape: LoweringOptions | None, costs: Costs, trained: Program) -> TimedProgram:
    """Return the Program of an evaluation: the forwards of `trained`, in the order of the schedule's rows.

    The verifier asks for every backward, and reports that (T101); nothing else may be wrong with it, and no forward
    missing.
    """
    forwards, shape = forward_only(schedule), forwards_of(shape)
    if shape is None:
        program = lower_running(forwards, reduce=False)
        ticks = expected(program)
    else:
        program = lower_weaving(forwards, costs, shape, reduce=False)
        ticks = durations(program, costs)
    wrong = [finding for finding in verify_program(program, ticks).findings if finding.code != "T101"]
    if wrong:
        raise ValueError(f"the forwards of this schedule alone are not sound: {wrong[0]}")
    assert _forwards(program) == _forwards(trained), "an evaluation runs every forward once"
    return TimedProgram(program, ticks)


def _forwards(program: Program) -> list[tuple[int, ...]]:
    """Return (rank, kind, micro-batch, chunk, layer) of all forward parts and their messages, in order of these."""
    kinds = (*program.layout.forward, *BLOCK_FORWARD.values(), OpKind.SEND_F, OpKind.RECV_F)
    ops = np.flatnonzero(np.isin(program.kind, kinds))
    rank = program.lane_rank[program.lane_of[ops]]
    columns = (rank, program.kind[ops], program.mb[ops], program.chunk[ops], program.layer[ops])
    return sorted(zip(*(column.tolist() for column in columns), strict=True))
