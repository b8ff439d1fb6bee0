"""The verifier against an executor written from the semantics alone, on damaged schedules and sound ones."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Literal

import pytest

import treadle
from tests.support.brute_force import execute
from tests.support.budget import Budget
from tests.support.mutations import MUTATIONS, mutate
from treadle.ir import Schedule
from treadle.ir.text import dump
from treadle.schedules import SCHEDULES, Family

COVERED_BY = {
    "hang": {"T201", "T202", "T203"},
    "wrong data": {"T204"},
    "missing": {"T101"},
    "double": {"T102"},
    "unknown": {"T105"},
}


def random_size(family: Family, random: Random) -> Schedule:
    for _ in range(1000):
        pp, vpp, num_mb = random.randint(1, 5), random.randint(1, 3), random.randint(1, 12)
        try:
            return family.generate(family.size(pp, vpp if not family.vpps else None, num_mb))
        except ValueError:
            continue
    raise AssertionError(f"no size of {family.name} found")


def judge(
    schedule: Schedule, *, eager: bool, ring: int | None, receives: Literal["sender", "use"]
) -> tuple[bool, set[str]]:
    """Both verdicts must agree; returns the verdict and the codes found."""
    outcome = execute(schedule, eager=eager, ring=ring, receives=receives)
    report = treadle.verify(schedule, ring=ring, receives=receives)
    codes = {finding.code for finding in report.findings}
    context = f"eager={eager} ring={ring} receives={receives}\n{dump(schedule)}\n{report}\n{outcome}"
    assert report.clean == outcome.clean, context
    for symptom in outcome.symptoms:
        assert codes & COVERED_BY[symptom], f"{symptom} is not covered\n{context}"
    assert ("hang" in outcome.symptoms) == bool(codes & COVERED_BY["hang"]), context
    if outcome.symptoms <= {"wrong data"}:
        assert report.peak_activations == outcome.peak, context
    return report.clean, codes


@pytest.mark.parametrize("name", SCHEDULES)
def test_mutations(name: str, budget: Budget) -> None:
    random = budget.random(name)
    seen: Counter[str] = Counter()
    verdicts: Counter[bool] = Counter()
    for number in budget.draws(least=8 * len(MUTATIONS)):
        damaged = mutate(random_size(SCHEDULES[name], random), random, MUTATIONS[number % len(MUTATIONS)])
        ring = random.choice((None, None, 1, 2, 3))
        receives: Literal["sender", "use"] = "use" if random.random() < 0.2 else "sender"
        clean, codes = judge(damaged, eager=random.random() < 0.3, ring=ring, receives=receives)
        verdicts[clean] += 1
        seen.update(codes)
    # The damage is varied enough that both verdicts and most codes come up.
    assert verdicts.keys() == {False, True}
    assert seen.keys() >= {"T101", "T102", "T103", "T201", "T202", "T203", "T204"}
    budget.covered(f"{len(MUTATIONS)} kinds of damage in turn, {told(seen)}, {verdicts[True]} unharmed")


def told(codes: Counter[str]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_schedules(name: str, budget: Budget) -> None:
    random = budget.random(name)
    for _ in budget.draws(least=15):
        schedule = random_size(SCHEDULES[name], random)
        clean, _ = judge(schedule, eager=False, ring=None, receives="sender")
        assert clean
        judge(schedule, eager=random.random() < 0.5, ring=random.choice((1, 2, 4)), receives="sender")
