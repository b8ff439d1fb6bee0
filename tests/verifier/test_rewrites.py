"""The verdict on a Program, and its makespan, do not depend on how it is written."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

import treadle
from tests.support.brute_force_program import execute as run_by_text
from tests.support.budget import Budget
from tests.support.held_verdicts import hold_to_oracle
from tests.support.program_mutations import MUTATIONS, freeze, mutate_program, thaw
from tests.support.rewrites import REWRITES, more_micro_batches
from tests.support.written_blocks import SOUND_BLOCKS
from tests.support.written_programs import SOUND, read
from tests.verifier.test_program_mutations import random_program
from treadle.ir.execute import execute
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout, Program
from treadle.schedules import SCHEDULES
from treadle.verifier import verify_program


def verdict(program: Program, ticks: int) -> tuple[set[str], int | None]:
    """The codes of its findings, and its makespan over the ticks of an op if it ends."""
    dur = np.full(program.num_ops, ticks, np.int64)
    times = execute(program, dur)
    codes = {finding.code for finding in verify_program(program, dur).findings}
    return codes, int(times.end.max()) // ticks if times.finished else None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rewritten_program_has_the_same_verdict(name: str, budget: Budget) -> None:
    random = budget.random(name)
    for number in budget.draws(least=2 * len(REWRITES)):
        program = random_program(SCHEDULES[name], random)
        rewrite = REWRITES[number % len(REWRITES)]
        assert verdict(rewrite(program, random, 1), 3) == verdict(program, 1) == (set(), verdict(program, 1)[1]), (
            rewrite
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rewritten_damaged_program_has_the_same_verdict(name: str, budget: Budget) -> None:
    """Chains are left out: a need that a chain meets in the sound program may be what the damage took away."""
    random = budget.random(name)
    for number in budget.draws(least=2 * len(MUTATIONS)):
        program = random_program(SCHEDULES[name], random)
        damaged = mutate_program(program, random, MUTATIONS[number % len(MUTATIONS)])
        rewrite = REWRITES[number % (len(REWRITES) - 1)]
        assert verdict(rewrite(damaged, random, 1), 1) == verdict(damaged, 1), (number, rewrite)


WRITTEN = [*SOUND, *SOUND_BLOCKS]


@pytest.mark.parametrize("number", range(len(WRITTEN)))
def test_a_rewritten_text_has_the_same_verdict(number: int, budget: Budget) -> None:
    """The hand-written programs, sound and damaged, judged by the executor that is written from the semantics too."""
    random = Random(number)
    program, _ = read(*WRITTEN[number])
    for draw in budget.draws(least=4 * len(REWRITES)):
        damaged = mutate_program(program, random) if draw % 4 else program
        rewrite = REWRITES[draw % (len(REWRITES) - (damaged is not program))]
        rewritten = rewrite(damaged, random, 1)
        assert verdict(rewritten, 1) == verdict(damaged, 1), rewrite
        hold_to_oracle(rewritten, np.ones(rewritten.num_ops, np.int64), run_by_text(rewritten, [1] * rewritten.num_ops))


@pytest.mark.parametrize(("layout", "text"), WRITTEN)
def test_a_text_with_more_micro_batches_is_as_sound(layout: Layout, text: str) -> None:
    program, _ = read(layout, text)
    for times in (2, 3, 7):
        more = more_micro_batches(program, times)
        codes, makespan = verdict(more, 1)
        assert codes == set()
        assert makespan is not None
        assert makespan <= times * (verdict(program, 1)[1] or 0)
        hold_to_oracle(more, np.ones(more.num_ops, np.int64), run_by_text(more, [1] * more.num_ops))


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_of_the_same_is_as_sound(name: str) -> None:
    """More micro-batches, more layers and both: clean, and each adds the same time to the step."""
    options = treadle.LoweringOptions(moe=True, offload=True, recompute=("attn",), layers=1, tied=((0, -1),))
    for mb in (8, 16, 32):
        schedule = treadle.generate(name, pp=4, microbatches=mb)
        for layers in (1, 2, 5):
            program = treadle.lower(schedule, treadle.load_costs("unit"), replace(options, layers=layers))
            codes, _ = verdict(program, 1)
            assert codes == set(), (mb, layers)


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
