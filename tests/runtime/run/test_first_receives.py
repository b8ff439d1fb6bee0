"""Receives of gradients in a step that learns the shapes: none is posted before a forward of its stage has run.

The shape of a gradient is that of the output, which only a forward tells. Judged over all schedules, by what lanes are
told to wait for, without processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import pytest
from torch import nn

import treadle
from treadle.costs import UNIT_COSTS, durations
from treadle.dist.device import Host
from treadle.ir.ops import OpKind
from treadle.ir.program import Ints, Op, Program
from treadle.lowering import LoweringOptions
from treadle.lowering.running import expected, host_order, lower_running, lower_weaving
from treadle.runtime.faults.guard import Guard
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.run.executor import Executor
from treadle.runtime.run.handlers import HANDLERS, OpCalls, maker_of
from treadle.runtime.run.lanes import SerialLanes
from treadle.runtime.run.lanes.lane import Run
from treadle.runtime.run.rank_program import RankProgram
from treadle.schedules import SCHEDULES

SIZES = [(2, 1), (2, 6), (3, 7)]
SHAPES = {
    "recomputed": LoweringOptions(layers=1, moe=True, recompute=("attn",)),
    "offloaded": LoweringOptions(layers=1, moe=True, offload=True, padded=True),
}


class AskedLanes(SerialLanes):
    """Lanes that run nothing, take ops `ahead` as threads do, and keep what each op is told to wait for."""

    ahead = True

    def __init__(self, ops: Sequence[Op]) -> None:
        super().__init__(ops, Host(timedelta(seconds=1)))
        self.behind: dict[int, list[int]] = {}
        self._before: dict[int, int] = {}

    def begin(self) -> None:
        super().begin()
        self.behind.clear()
        self._before.clear()

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        self.behind[op] = [*after, *(self._before[of] for of in {lane, 0} if of in self._before)]
        self._before[lane] = op

    def ended_before(self, op: int) -> set[int]:
        """Return the ops that have ended whenever `op` starts, on threads: the caller's thread is lane 0."""
        ended, todo = set[int](), [op]
        while todo:
            new = set(self.behind[todo.pop()]) - ended
            ended |= new
            todo += new
        return ended


def programs(name: str, pp: int, microbatches: int) -> dict[str, Program]:
    """Return the Programs of a schedule at both granularities; none if it cannot do the size."""
    try:
        schedule = treadle.generate(name, pp=pp, microbatches=microbatches)
    except ValueError:
        return {}
    made = {shape: lower_weaving(schedule, UNIT_COSTS, SHAPES[shape], reduce=True) for shape in SHAPES}
    return made | {"cells": lower_running(schedule, reduce=True)}


def executor_of(program: Program, rank: int, order: Ints) -> tuple[Executor, AskedLanes]:
    grid = program.layout.placement.stages
    stages = {chunk: Chunk(number, nn.Identity(), None, 0) for chunk, number in enumerate(grid[rank])}
    anything, gradients = mock.MagicMock(), mock.MagicMock(group=None, expert_dp_group=None, tied_groups={})
    part = RankProgram(program, rank, stages, anything, anything, gradients, lambda pp_rank: pp_rank)
    lanes: list[AskedLanes] = []

    def make(names: list[str], ops: list[Op]) -> AskedLanes:
        lanes.append(AskedLanes(ops))
        return lanes[0]

    handlers = dict.fromkeys(HANDLERS, lambda part, op: OpCalls(lambda: None))
    return Executor(part, order, make, handlers), lanes[0]


def posted_too_early(executor: Executor, lanes: AskedLanes) -> list[str]:
    """Return the receives of gradients that may be posted while no forward of their stage has ended."""
    program, own = executor.program, executor.own
    place = {op.index: at for at, op in enumerate(own)}
    ends: dict[int, set[int]] = {}
    for send in own:
        if send.kind is OpKind.SEND_F:
            maker = maker_of(program, send)
            ends.setdefault(maker.chunk, set()).add(place[maker.index])
    first = {op.chunk: op for op in reversed(own) if op.kind is OpKind.RECV_B}  # the others follow on its lane
    return [str(op) for op in first.values() if not ends[op.chunk] & lanes.ended_before(place[op.index])]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_gradient_is_posted_before_a_forward_of_its_stage_has_run(name: str) -> None:
    num_receives = 0
    for pp, microbatches in SIZES:
        for shape, program in programs(name, pp, microbatches).items():
            ticks = expected(program) if shape == "cells" else durations(program, UNIT_COSTS)
            for rank, order in enumerate(host_order(program, ticks)):
                executor, lanes = executor_of(program, rank, order)
                executor.run(Guard())
                early = posted_too_early(executor, lanes)
                assert not early, f"pp={pp} M={microbatches} {shape}, rank {rank}: {early}"
                num_receives += sum(op.kind is OpKind.RECV_B for op in executor.own)
    assert num_receives
