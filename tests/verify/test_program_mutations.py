"""The verifier of Programs against an executor written from the semantics alone: 700 damaged programs of each."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import treadle
from tests.support.brute_force_program import execute
from tests.support.program_mutations import mutate_program
from treadle.ir.program import OpKind, Program
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layers import Shape
from treadle.passes.lower import lower_layers
from treadle.passes.mesh import spread
from treadle.schedules import SCHEDULES, Family
from treadle.verify import verify_program

MUTATIONS_EACH = 700
PARTS = 4

COVERED_BY = {
    "hang": {"T201", "T202", "T203", "T205"},
    "wrong data": {"T204", "T401"},
    "missing": {"T101"},
    "double": {"T102"},
    "unknown": {"T105"},
    "launch order": {"T206"},
}

SIZES = {
    **dict.fromkeys((OpKind.SEND_F, OpKind.RECV_F, OpKind.SEND_B, OpKind.RECV_B), 5),
    OpKind.DISPATCH_F: 7,
    OpKind.COMBINE_F: 9,
}


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
        program = lower_cells(schedule)
    else:
        program = lower_layers(schedule, random_shape(schedule, random), reduce=random.random() < 0.5)
    if random.random() < 0.5:
        program = order_launches(program, random_durations(program, random))
    if program.num_ops < 150 and random.random() < 0.6:
        program = spread(program, ep=random.choice((1, 2)), dp=random.choice((1, 2)))
    return program if program.num_ops <= 700 else random_program(family, random)


def random_shape(schedule: treadle.Schedule, random: Random) -> Shape:
    def flag() -> bool:
        return random.random() < 0.5

    head = flag()
    split = random.choice(((), (OpKind.MLP_W,), (OpKind.MLP_W, OpKind.ATTN_W)))
    depths = tuple(random.randint(1, 2) for _ in range(schedule.placement.num_stages))
    return Shape(
        layers=random.choice((1, 2, depths)),
        moe=flag(),
        counts=flag(),
        embedding=flag(),
        head=head,
        split=(*split, OpKind.HEAD_W) if head and flag() else split,
        hold_attn_w=flag(),
        early_mlp_w=flag(),
        offload=flag(),
        saved={OpKind.ATTN_F: 8, OpKind.MLP_F: 4, OpKind.EMBED_F: 3, OpKind.HEAD_F: 16},
        moved=SIZES,
        kept=0.5,
    )


def random_durations(program: Program, random: Random) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([random.choice((0, 1, 1, 2, 5)) for _ in range(program.num_ops)], np.int64)


def judge(program: Program, random: Random) -> tuple[bool, set[str]]:
    """Both verdicts must agree, and every symptom be covered; returns the verdict and the codes."""
    dur = random_durations(program, random)
    outcome = execute(program, dur.tolist())
    report = verify_program(program, dur)
    codes = {finding.code for finding in report.findings}
    context = f"{report}\n{sorted(outcome.symptoms)}\n" + "\n".join(outcome.notes[:12])
    assert report.clean == outcome.clean, context
    for symptom in outcome.symptoms:
        assert codes & COVERED_BY[symptom], f"{symptom} is not covered\n{context}"
    assert ("hang" in outcome.symptoms) == bool(codes & COVERED_BY["hang"]), context
    assert ("unknown" in outcome.symptoms) == ("T105" in codes), context
    assert ("missing" in outcome.symptoms) == ("T101" in codes), context
    assert ("double" in outcome.symptoms) == ("T102" in codes), context
    assert ("launch order" in outcome.symptoms) == ("T206" in codes), context
    if outcome.clean:
        assert report.peaks == outcome.peak, context
    return report.clean, codes


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCHEDULES)
def test_mutations(name: str, part: int) -> None:
    random = Random(f"{name}/{part}")
    seen: set[str] = set()
    num_clean = 0
    for _ in range(MUTATIONS_EACH // PARTS):
        damaged = mutate_program(random_program(SCHEDULES[name], random), random)
        clean, codes = judge(damaged, random)
        num_clean += clean
        seen |= codes
    # The damage is varied enough that both verdicts and every code come up.
    assert 0 < num_clean < MUTATIONS_EACH // PARTS
    assert seen >= {"T101", "T102", "T105", "T201", "T202", "T203", "T204", "T205", "T206", "T401"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_programs(name: str) -> None:
    random = Random(name)
    for _ in range(30):
        clean, codes = judge(random_program(SCHEDULES[name], random), random)
        assert clean, codes
