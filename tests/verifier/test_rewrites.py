"""The verdict on a Program, and its makespan, do not depend on how it is written."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

import treadle
from tests.support.budget import Budget
from tests.support.program_mutations import MUTATIONS, Record, freeze, mutate_program, thaw
from tests.verifier.test_program_mutations import random_program
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.schedules import SCHEDULES
from treadle.verifier import verify_program

Rewrite = Callable[[Program, Random, int], Program]
"""Returns the same step in other columns; every op takes so many ticks."""


def lanes_in_another_order(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft = thaw(program)
    random.shuffle(draft.lanes)
    return freeze(draft)


def receives_first(program: Program, random: Random, ticks: int) -> Program:
    del random, ticks
    draft = thaw(program)
    draft.lanes.sort(key=lambda lane: lane.kind is not LaneKind.RECV)
    return freeze(draft)


def dependencies_in_another_order(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft = thaw(program)
    for op in draft.ops:
        random.shuffle(op.deps)
    return freeze(draft)


def longer_chains(program: Program, random: Random, ticks: int) -> Program:
    """Each dependency becomes one on an op that has waited for it, and has ended by then."""
    draft, times = thaw(program), execute(program, np.full(program.num_ops, ticks, np.int64))
    ops, number = draft.ops, {id(op): at for at, op in enumerate(draft.ops)}
    after: dict[int, list[Record]] = {}
    for op in ops:
        for dep in op.deps:
            after.setdefault(id(dep), []).append(op)
    for op in ops:
        start = times.start[number[id(op)]]
        for at, dep in enumerate(op.deps):
            between = [mid for mid in after.get(id(dep), ()) if 0 <= times.end[number[id(mid)]] <= start]
            if dep is not None and start >= 0 and between and random.random() < 0.7:
                op.deps[at] = random.choice(between)
    return freeze(draft)


REWRITES: tuple[Rewrite, ...] = (
    lanes_in_another_order,
    receives_first,
    dependencies_in_another_order,
    longer_chains,
)


def verdict(program: Program, ticks: int) -> tuple[set[str], int | None]:
    """The codes of its findings, and its makespan over the ticks of an op if it ends."""
    dur = np.full(program.num_ops, ticks, np.int64)
    times = execute(program, dur)
    codes = {finding.code for finding in verify_program(program, dur).findings}
    return codes, int(times.end.max()) // ticks if times.finished else None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rewritten_program_has_the_same_verdict(name: str, budget: Budget) -> None:
    random = Random(name)
    for number in budget.draws(least=len(REWRITES)):
        program = random_program(SCHEDULES[name], random)
        rewrite = REWRITES[number % len(REWRITES)]
        assert verdict(rewrite(program, random, 1), 3) == verdict(program, 1) == (set(), verdict(program, 1)[1]), (
            rewrite
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rewritten_damaged_program_has_the_same_verdict(name: str, budget: Budget) -> None:
    """Chains are left out: a need that a chain meets in the sound program may be what the damage took away."""
    random = Random(name)
    for number in budget.draws(least=2 * len(MUTATIONS)):
        program = random_program(SCHEDULES[name], random)
        damaged = mutate_program(program, random, MUTATIONS[number % len(MUTATIONS)])
        rewrite = REWRITES[number % (len(REWRITES) - 1)]
        assert verdict(rewrite(damaged, random, 1), 1) == verdict(damaged, 1), (number, rewrite)


@pytest.mark.parametrize("num_mb", [60, 80, 160])
def test_any_number_of_chains_is_sound(num_mb: int) -> None:
    """The step of more micro-batches is as sound; what broke it was a number of searches."""
    draft, replaced = thaw(offloaded(num_mb)), 0
    copies = {id(dep): op for op in draft.ops if op.kind == OpKind.OFFLOAD for dep in op.deps}
    for op in draft.ops:
        for at, dep in enumerate(op.deps):
            if op.kind == OpKind.ATTN_F and dep is not None and dep.kind == OpKind.COMBINE_F and id(dep) in copies:
                op.deps[at] = copies[id(dep)]
                replaced += 1
    program = freeze(draft)
    report = verify_program(program, np.ones(program.num_ops, np.int64))
    assert replaced > 2 * num_mb
    assert report.clean, report.findings[:3]


def offloaded(num_mb: int) -> Program:
    schedule = treadle.generate("1f1b", pp=4, microbatches=num_mb)
    options = treadle.LoweringOptions(layers=2, moe=True, offload=True, padded=True)
    return treadle.lower(schedule, treadle.load_costs("unit"), options)
