"""The Program that a pipeline runs: a schedule with its reductions, its receive rings and its launch order.

A rank has one thread that launches. So the order in which it comes to its ops, of all lanes, is part of the plan:
`host_order`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import count

import numpy as np

from treadle.costs import Costs, durations
from treadle.ir import Action, Cell, Kind, Schedule
from treadle.ir.execute import execute, leaders
from treadle.ir.ops import BUCKET_OPS, LaneKind, OpKind, OpRole, column
from treadle.ir.program import NEVER, Ints, Longs, Program
from treadle.lowering.lower import choose
from treadle.lowering.options import LoweringOptions
from treadle.passes.cells import lower_cells
from treadle.passes.edges import launch_edges
from treadle.passes.launch import order_launches
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.ring import with_ring
from treadle.passes.step_end import Buckets, with_step_end

_TICKS = {OpRole.ACTION: 16, OpRole.REDUCTION: 8, OpRole.STEP_END: 8}  # a whole backward takes twice as long
_MESSAGE = 1  # a message takes some time, or none would be posted before its reader is there


def lower_running(
    schedule: Schedule,
    *,
    reduce: bool,
    gather: bool = False,
    tied: tuple[tuple[int, ...], ...] = (),
    buckets: Buckets = (),
) -> Program:
    """Return the Program of one pipeline, as a rank with one compute thread runs it.

    The forward and the backward of an overlapped cell run one after the other. Each channel has as few receive buffers
    as the schedule can do with, and at least two, so that one fills while the other is read.
    """
    program = lower_cells(schedule)
    program = replace(program, joined=np.zeros(program.num_ops, bool))
    program = with_step_end(program, reduce=reduce, gather=gather, tied=tied, buckets=buckets)
    return _bounded(program, expected(program), schedule)


def lower_weaving(
    schedule: Schedule,
    costs: Costs,
    options: LoweringOptions,
    *,
    reduce: bool,
    gather: bool = False,
    tied: tuple[tuple[int, ...], ...] = (),
    buckets: Buckets = (),
) -> Program:
    """Return the Program of one pipeline at the grain of layers, as a rank with a thread or a stream a lane runs it.

    It ends with the gradients: the optimizer's step is the caller's, whatever it costs.
    """
    shape = replace(choose(schedule, costs, replace(options, tied=tied, buckets=buckets)), step_end=())
    program = lower_layers(schedule, shape, reduce=reduce, gather=gather)
    return _bounded(program, durations(program, costs), schedule)


def _bounded(program: Program, ticks: Longs, schedule: Schedule) -> Program:
    """Add receive rings as small as the schedule allows, and number the launches."""
    for ring in count(2):
        bounded = with_ring(program, ring)
        if ring >= schedule.num_microbatches * schedule.vpp or execute(bounded, ticks).finished:
            return order_launches(bounded, ticks)
    raise AssertionError("a ring as long as the step is no ring")


def expected(program: Program) -> Longs:
    """Return durations for ordering a rank's launches: only their proportions matter."""
    table = column(lambda kind: _TICKS.get(kind.role, _MESSAGE), np.int64)
    table[OpKind.B] *= 2
    ticks: Longs = table[program.kind]
    return ticks


def host_order(program: Program, ticks: Longs, *, by_start: bool = False) -> list[Ints]:
    """Return each rank's ops of all lanes in the order in which its thread launches them.

    What runs beside computation is launched before the compute op during which it would start if the thread were
    free, as it cannot depend on that op. Whatever an op waits for ended before that moment in one execution of the
    whole program, so ranks that go through their lists, and wait where they must, all come to the end.

    Where the thread only launches and a device computes, ops go `by_start`: an op that blocks the thread, as the wait
    for counts does, then comes after the compute op that hides it.
    """
    source, target = launch_edges(program)
    after = np.full(program.num_ops, NEVER, np.int32)
    after[target] = source
    times = execute(program, ticks * 2 + 1, after=after)
    assert times.finished, "the verifier has looked at the launch order"
    rank = program.lane_rank[program.lane_of]
    computes = (program.lane_kind == LaneKind.COMPUTE)[program.lane_of]
    lists = []
    for r in range(program.num_ranks):
        if by_start:
            own = np.flatnonzero(rank == r)
            lists.append(own[np.lexsort((program.launch[own], times.start[own]))].astype(np.int32))
            continue
        compute, beside = np.flatnonzero((rank == r) & computes), np.flatnonzero((rank == r) & ~computes)
        place = np.searchsorted(times.end[compute], times.start[beside], side="right")
        ops = np.concatenate([beside, compute])
        turn = np.concatenate([place, np.arange(len(compute))])
        last = np.concatenate([np.zeros(len(beside), bool), np.ones(len(compute), bool)])
        lists.append(ops[np.lexsort((program.launch[ops], times.start[ops], last, turn))].astype(np.int32))
    return lists


def join_halves(schedule: Schedule, places: Collection[tuple[int, int]]) -> Schedule:
    """Return the schedule with whole backwards on those (rank, chunk) whose modules cannot split dgrad and wgrad."""

    def joined(rank: int, cell: Cell) -> Cell | None:
        if not isinstance(cell, Action) or (rank, cell.chunk) not in places:
            return cell
        if cell.kind is Kind.W:
            return None
        return cell._replace(kind=Kind.B) if cell.kind is Kind.I else cell

    if not places:
        return schedule
    rows = tuple(
        tuple(cell for cell in (joined(rank, c) for c in row) if cell is not None)
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, rows=rows, issue=())


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, each rank's in its own order: an evaluation.

    Forwards wait for nothing but forwards, so what is left of a sound schedule comes to its end too.
    """
    rows = tuple(
        tuple(action for cell in row for action in cell.actions if action.kind is Kind.F) for row in schedule.rows
    )
    receives = {
        channel: tuple(label for label in labels if label.kind is Kind.F)
        for channel, labels in schedule.receives.items()
    }
    return replace(schedule, rows=rows, receives=receives, issue=())


def disagreements(program: Program) -> list[str]:
    """List differences between the ranks' host orders and the verified program, over all of its ranks.

    Each rank's list has its ops once; each lane's are launched in the lane's order; and what two ends of a channel,
    or the members of a group, launch as their k-th has one name.
    """
    place = np.full(program.num_ops, NEVER, np.int64)
    rank = program.lane_rank[program.lane_of]
    found = []
    for r, ops in enumerate(host_order(program, expected(program))):
        if not np.array_equal(np.sort(ops), np.flatnonzero(rank == r)):
            found.append(f"rank {r} does not go through its own ops, each once")
        place[ops] = np.arange(len(ops))
    for lane in range(program.num_lanes):
        first, last = int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])
        if (np.diff(place[first:last]) <= 0).any():
            found.append(f"{program.lane(lane)} is launched in another order than its own")
    lead = leaders(program)
    led = np.flatnonzero(lead != np.arange(program.num_ops)).astype(np.int32)
    for op in led[_name_of(program, led) != _name_of(program, lead[led])]:
        found.append(f"{program.op(int(op))} goes together with {program.op(int(lead[op]))}")
    return found


def _name_of(program: Program, ops: Ints) -> Longs:
    """Return a number for what ops have in common with those they go together with.

    A message's label, a reduction's stage, the number of a tie.
    """
    rank = program.lane_rank[program.lane_of[ops]] // program.layout.num_replicas
    stage = np.array(program.layout.placement.stages, np.int64)[rank, program.chunk[ops]]
    kind = program.kind[ops]
    what = np.select(
        [np.isin(kind, (OpKind.REDUCE_GRAD, *BUCKET_OPS)), kind == OpKind.REDUCE_TIED],
        [stage * program.layout.max_numbers + program.layer[ops], program.layer[ops]],
        program.chunk[ops],
    )
    gradient = np.isin(program.kind[ops], (OpKind.SEND_B, OpKind.RECV_B))
    number: Longs = ((program.mb[ops].astype(np.int64) + 1) * 2 + gradient) * (stage.max(initial=0) + 1) + what
    return number
