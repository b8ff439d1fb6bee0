"""What is promised of a step holds against all orders there are, on steps small enough to try them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import treadle
from tests.support.budget import Budget
from tests.synthesize.drawn_steps import PLACEMENTS, DrawnStep, draw_step
from treadle.synthesize import SolverOptions, Synthesis, synthesize_schedule

MICROBATCHES = {"one rank": (1, 2, 3), "two ranks": (1, 2, 3), "two pipes": (2,), "two chunks on one rank": (1, 2, 3)}
"""Of steps that the oracle is done with in a second; 1 and 2 in other placements."""


def _synthesize(step: DrawnStep) -> Synthesis:
    return synthesize_schedule(
        pp=step.tiny.placement.pp,
        placement=step.tiny.placement,
        microbatches=step.microbatches,
        costs=step.costs,
        limits=step.limits,
        whole=step.tiny.whole,
        options=step.options,
        solver=SolverOptions(time_limit_s=300, workers=1),
    )


def _check(step: DrawnStep) -> Synthesis:
    found = _synthesize(step)
    program = treadle.lower(found.schedule, step.costs, step.options)
    assert treadle.simulate(program, step.costs).makespan == found.makespan, step.text
    assert treadle.verify(found.schedule, max_activations=step.limits.max_activations).clean, step.text
    if step.limits.memory_limit is not None:
        limit = step.limits.memory_limit
        assert treadle.verify(program, costs=step.costs, memory_limit=limit).clean, step.text
    best = step.tiny.shortest(found.makespan + step.slack)
    assert best is not None, f"no order is as fast as this one\n{step.text}"
    assert found.lower_bound <= best + step.slack, step.text
    assert not found.proven or found.makespan <= best + step.slack, step.text
    assert found.proven or not step.may_prove, step.text
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_bounds_hold_and_proofs_are_true(name: str, budget: Budget) -> None:
    sizes = MICROBATCHES.get(name, (1, 2))
    seen: Counter[str] = Counter()
    for seed in budget.draws(least=10):
        step = draw_step(f"{name} {seed + budget.seed}", PLACEMENTS[name](), sizes[seed % len(sizes)])
        found = _check(step)
        seen += Counter(_kinds(step, found))
    assert seen.keys() >= {"proven", "limited", "pairs"}
    budget.covered(", ".join(f"{kind} {count}" for kind, count in sorted(seen.items())))


def _kinds(step: DrawnStep, found: Synthesis) -> Iterator[str]:
    """What there was to get wrong."""
    yield from ("proven",) if found.proven else ()
    yield from ("by the solver",) if found.source == "solver" else ()
    yield from ("pairs",) if step.tiny.pairs else ()
    yield from ("limited",) if step.tiny.rooms else ()
    yield from ("whole",) if step.tiny.whole else ()
