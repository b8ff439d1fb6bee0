"""The verifier of Programs against an executor written from the semantics alone, on damaged programs and sound ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TypedDict

import numpy as np
import pytest

import treadle
from tests.support.brute_force_program import execute
from tests.support.budget import Budget
from tests.support.held_verdicts import hold_to_oracle
from tests.support.program_mutations import MUTATIONS, mutate_program
from tests.verifier.test_mutations import told
from treadle.ir.ops import STEP_ENDS, OpKind
from treadle.ir.program import Program
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.layers import Shape
from treadle.passes.mesh import spread
from treadle.passes.step_end import with_step_end
from treadle.schedules import SCHEDULES, Family

MOST_OPS = 300
"""Of a program, which are enough for several layers, chunks and ranks of any kind."""

SIZES = {
    **dict.fromkeys((OpKind.SEND_F, OpKind.RECV_F, OpKind.SEND_B, OpKind.RECV_B), 5),
    OpKind.DISPATCH_F: 7,
    OpKind.COMBINE_F: 9,
}


# even where a half of it may be kept
SAVED = {
    OpKind.F: 5,
    OpKind.ATTN_F: 8,
    OpKind.DISPATCH_F: 3,
    OpKind.MLP_F: 4,
    OpKind.ATTN_R: 6,
    OpKind.MLP_R: 10,
    OpKind.EMBED_F: 3,
    OpKind.MTP_F: 14,
    OpKind.HEAD_F: 16,
}
DENSE_SAVED = {OpKind.F: 2, OpKind.MLP_F: 12, OpKind.OFFLOAD: 7, OpKind.ATTN_R: 2, OpKind.HEAD_F: 99}


class Scales(TypedDict):
    """Those of a Layout and of a Shape."""

    stage_scale: tuple[float, ...]
    mb_scale: tuple[float, ...]


def random_schedule(family: Family, random: Random) -> treadle.Schedule:
    while True:
        pp, vpp, num_mb = random.randint(1, 4), random.randint(1, 2), random.randint(1, 8)
        try:
            return family.generate(family.size(pp, vpp if not family.vpps else None, num_mb))
        except ValueError:
            continue


def random_program(family: Family, random: Random) -> Program:
    """A sound program of some hundred ops, at either grain."""
    schedule = random_schedule(family, random)
    if random.random() < 0.3:
        program = random_cells(schedule, random)
    else:
        shape = random_shape(schedule, random)
        gather = bool(shape.buckets) and random.random() < 0.7
        program = lower_layers(schedule, shape, reduce=random.random() < 0.5, gather=gather)
    if random.random() < 0.5:
        program = order_launches(program, random_durations(program, random))
    if program.num_ops <= MOST_OPS // 2 and random.random() < 0.8:
        program = spread(program, ep=random.choice((1, 2)), dp=random.choice((1, 2)))
    return program if program.num_ops <= MOST_OPS else random_program(family, random)


def random_cells(schedule: treadle.Schedule, random: Random) -> Program:
    """Cells that know their blocks or do not."""
    program = lower_cells(schedule)
    if random.random() < 0.5:
        blocks = random_blocks(schedule.placement.num_stages, random)
        sized = replace(
            program.layout, blocks=blocks, saved=SAVED, dense_saved=DENSE_SAVED, **random_scales(schedule, random)
        )
        program = replace(program, layout=sized)
    tied, step_end = random_ties(schedule, random), random.choice(STEP_ENDS)
    if random.random() < 0.5:
        return with_step_end(program, tied=tied, step_end=step_end)
    buckets = ((0,),) * schedule.placement.num_stages
    of_step = tuple(kind for kind in step_end if kind != OpKind.GATHER_PARAMS)
    return with_step_end(
        program, tied=tied, step_end=of_step, buckets=buckets, reduce=True, gather=random.random() < 0.5
    )


def random_shape(schedule: treadle.Schedule, random: Random) -> Shape:
    def flag() -> bool:
        return random.random() < 0.5

    def some(*kinds: OpKind) -> tuple[OpKind, ...]:
        return tuple(kind for kind in kinds if flag())

    scales = random_scales(schedule, random)
    blocks = random_blocks(schedule.placement.num_stages, random)
    buckets = random_buckets(blocks, random) if flag() else ()
    step_end = tuple(kind for kind in random.choice(STEP_ENDS) if not (buckets and kind == OpKind.GATHER_PARAMS))
    return Shape(
        blocks=blocks,
        moe=flag(),
        counts=flag(),
        split=random.choice(((), (OpKind.MLP_W,), (OpKind.MLP_W, OpKind.ATTN_W))) + some(OpKind.MTP_W, OpKind.HEAD_W),
        hold_attn_w=flag(),
        early_mlp_w=flag(),
        recompute=some(OpKind.ATTN_R, OpKind.MLP_R) if flag() else (),
        early_recompute=flag(),
        offload=flag(),
        saved={**SAVED, **({OpKind.OFFLOAD: 5} if any(scales.values()) else {})},
        dense_saved=DENSE_SAVED if flag() else {},
        moved=SIZES,
        kept=random.choice((0.0, 1.0) if any(scales.values()) else (0.0, 0.5, 1.0)),
        tied=random_ties(schedule, random),
        step_end=step_end,
        buckets=buckets,
        **scales,
    )


def random_blocks(num_stages: int, random: Random) -> tuple[str, ...]:
    """A model of up to two blocks a stage and a few more, cut anywhere; some stages may have no layer."""
    ends = random.choice(("", "E")), random.choice(("", "m", "mm")) + random.choice(("", "L"))
    num_layers = max(1, random.randint(num_stages, 2 * num_stages) - len("".join(ends)))
    model = ends[0] + "".join(random.choice("dtt") for _ in range(num_layers)) + ends[1]
    cuts = sorted(random.sample(range(1, len(model)), num_stages - 1))
    return tuple(model[start:end] for start, end in pairwise((0, *cuts, len(model))))


def random_buckets(blocks: tuple[str, ...], random: Random) -> tuple[tuple[int, ...], ...]:
    """Cuts of each stage's row, at any of its blocks."""
    return tuple((*(at for at in range(len(row) - 1, 0, -1) if random.random() < 0.5), 0) for row in blocks)


def random_ties(schedule: treadle.Schedule, random: Random) -> tuple[tuple[int, ...], ...]:
    stages = range(schedule.placement.num_stages)
    if len(stages) < 2 or random.random() < 0.5:
        return ()
    return tuple(
        tuple(sorted(random.sample(stages, random.choice((2, 2, min(3, len(stages)))))))
        for _ in range(random.choice((1, 1, 2)))
    )


def random_scales(schedule: treadle.Schedule, random: Random) -> Scales:
    """Factors that a float holds exactly, so that halves are halves."""

    def some(number: int) -> tuple[float, ...]:
        return tuple(random.choice((0.25, 0.5, 1.0, 1.5, 2.0)) for _ in range(number)) if random.random() < 0.4 else ()

    return {"stage_scale": some(schedule.placement.num_stages), "mb_scale": some(schedule.num_microbatches)}


def random_durations(program: Program, random: Random) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([random.choice((0, 1, 1, 2, 5)) for _ in range(program.num_ops)], np.int64)


def judge(program: Program, random: Random) -> tuple[bool, set[str]]:
    """Both verdicts must agree, and every symptom be covered; returns the verdict and the codes."""
    dur = random_durations(program, random)
    report = hold_to_oracle(program, dur, execute(program, dur.tolist()))
    return report.clean, {finding.code for finding in report.findings}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_mutations(name: str, budget: Budget) -> None:
    """Each kind of damage in turn; two and two draws damage the same program."""
    random = budget.random(name)
    seen: Counter[str] = Counter()
    verdicts: Counter[bool] = Counter()
    program = random_program(SCHEDULES[name], random)
    for number in budget.draws(least=4 * len(MUTATIONS)):
        if number % 2 == 0:
            program = random_program(SCHEDULES[name], random)
        clean, codes = judge(mutate_program(program, random, MUTATIONS[number % len(MUTATIONS)]), random)
        verdicts[clean] += 1
        seen.update(codes)
    # The damage is varied enough that both verdicts and every code come up.
    assert verdicts.keys() == {False, True}
    assert seen.keys() >= {"T101", "T102", "T105", "T201", "T202", "T203", "T204", "T205", "T206", "T401"}
    budget.covered(f"{len(set(MUTATIONS))} kinds of damage in turn, {told(seen)}, {verdicts[True]} unharmed")


@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_programs(name: str, budget: Budget) -> None:
    random = budget.random(name)
    for _ in budget.draws(least=15):
        clean, codes = judge(random_program(SCHEDULES[name], random), random)
        assert clean, codes
