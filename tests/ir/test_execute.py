"""The one execution with a duration for each op, and with members of a group that end each after its own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import treadle
from tests.verifier.test_program_mutations import random_program
from treadle.ir.execute import execute, leaders, makespans
from treadle.ir.ops import OpKind
from treadle.ir.program import Longs, Program
from treadle.schedules import SCHEDULES
from treadle.simulator import Durations


def ends_by_relaxing(program: Program, dur: Longs) -> Longs:
    """The ends of ops with own durations, by going over all of them until nothing moves: slow and plain."""
    lead = leaders(program)
    rows = [np.flatnonzero(lead == first) for first in np.unique(lead)]
    opens = set(program.lane_ptr[:-1].tolist())
    end = np.zeros(program.num_ops, np.int64)
    while True:
        before = end.copy()
        for members in rows:
            waits = [dep for op in members for dep in program.deps(int(op))]
            waits += [int(op) - 1 for op in members if op not in opens and op - 1 not in members]
            start = max((int(end[op]) for op in waits), default=0)
            own = dur[members]
            joined = program.joined[members].any()
            end[members] = start + (own.max() if joined else own)
        if (before == end).all():
            return end


@pytest.mark.parametrize("name", SCHEDULES)
def test_members_of_a_group_end_each_after_its_own_duration(name: str) -> None:
    random = Random(name)
    program = random_program(SCHEDULES[name], random)
    dur = np.array([random.randrange(50) for _ in range(program.num_ops)], np.int64)
    times = execute(program, dur, own_ends=True)
    assert times.finished
    assert (times.end == ends_by_relaxing(program, dur)).all()
    later = execute(program, dur, own_ends=True, begin=1000)
    assert (later.end == times.end + 1000).all()


def test_makespans_are_those_of_single_executions() -> None:
    program = treadle.lower(treadle.generate("dualpipev", pp=4, microbatches=8))
    rows = np.random.default_rng(1).integers(0, 100, (6, program.num_ops))
    found = makespans(program, rows)
    assert found.tolist() == [execute(program, row, own_ends=True).end.max() for row in rows]


def test_makespans_with_messages_that_end_before_they_start() -> None:
    program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=1))
    kinds = {OpKind.F: 10, OpKind.B: 20, OpKind.SEND_F: 2, OpKind.RECV_F: -3, OpKind.SEND_B: 1, OpKind.RECV_B: 4}
    dur = np.array([kinds[OpKind(kind)] for kind in program.kind], np.int64)
    assert makespans(program, dur[None]).tolist() == [10 - 3 + 10 + 20 + 4 + 20]


def test_a_program_that_does_not_finish_has_no_makespan() -> None:
    crossed = treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")
    program = treadle.lower(crossed)
    assert makespans(program, np.ones((2, program.num_ops), np.int64)).tolist() == [-1, -1]


def test_durations_are_simulated_by_the_public_function() -> None:
    program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=1))
    dur = np.select([program.kind == OpKind.SEND_F, program.kind == OpKind.RECV_F], [9, 1], 10)
    together = treadle.simulate(program, Durations(dur))
    apart = treadle.simulate(program, Durations(dur, own_ends=True, about="what was measured"))
    assert together.makespan - apart.makespan == 8
    assert apart.about == "predicted with what was measured"
    slower = treadle.simulate(program, Durations(dur), slowness=0.5)
    assert slower.makespan > together.makespan


def test_durations_that_do_not_fit_are_refused() -> None:
    schedule = treadle.generate("1f1b", pp=2, microbatches=1)
    program = treadle.lower(schedule)
    dur = np.ones(program.num_ops, np.int64)
    with pytest.raises(ValueError, match=r"durations are one for each of 8 ops, got an array of shape \(7,\)"):
        treadle.simulate(program, Durations(dur[1:]))
    dur[2] = -1
    with pytest.raises(ValueError, match=r"durations are 0 or more ticks, got -1 for F0.0 \(op 2\)"):
        treadle.simulate(program, Durations(dur))
    with pytest.raises(ValueError, match="Durations are one for each op of a Program; lower the schedule first"):
        treadle.simulate(schedule, Durations(dur))
