"""The order in which a rank's thread launches ops on a device that runs behind it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import treadle
from treadle.costs import UNIT_COSTS, durations
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Longs, Program
from treadle.lowering.options import LoweringOptions
from treadle.lowering.running import host_order, lower_weaving
from treadle.schedules import SCHEDULES


def woven(name: str) -> tuple[Program, Longs]:
    schedule = treadle.generate(name, pp=2, microbatches=8)
    program = lower_weaving(schedule, UNIT_COSTS, LoweringOptions(layers=2, moe=True, offload=True), reduce=True)
    return program, durations(program, UNIT_COSTS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_op_comes_once_behind_what_it_waits_for_and_lanes_keep_their_order(name: str) -> None:
    program, ticks = woven(name)
    rank = program.lane_rank[program.lane_of]
    for r, ops in enumerate(host_order(program, ticks, by_start=True)):
        assert np.array_equal(np.sort(ops), np.flatnonzero(rank == r))
        place = {int(op): at for at, op in enumerate(ops)}
        for op in map(int, ops):
            assert all(place[dep] < place[op] for dep in program.deps(op))
        for lane in np.flatnonzero(program.lane_rank == r):
            of_lane = range(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1]))
            assert all(place[a] < place[b] for a, b in pairwise(of_lane))


def hidden(program: Program, ticks: Longs, *, by_start: bool) -> tuple[int, int]:
    """Of the waits for counts that begin while something computes: how many are launched behind it, and all."""
    times = execute(program, ticks * 2 + 1)
    computes = (program.lane_kind == LaneKind.COMPUTE)[program.lane_of]
    behind = every = 0
    for ops in host_order(program, ticks, by_start=by_start):
        place = {int(op): at for at, op in enumerate(ops)}
        for wait in (int(op) for op in ops if program.kind[op] == OpKind.HOST):
            at = times.start[wait]
            beside = [int(op) for op in ops if computes[op] and times.start[op] < at < times.end[op]]
            every += len(beside)
            behind += sum(place[op] < place[wait] for op in beside)
    return behind, every


def test_a_wait_of_the_host_is_launched_behind_the_computation_that_hides_it() -> None:
    program, ticks = woven("interleaved-overlap")
    behind, every = hidden(program, ticks, by_start=True)
    assert behind == every > 10
    assert hidden(program, ticks, by_start=False)[0] == 0  # a thread that computes cannot launch meanwhile
