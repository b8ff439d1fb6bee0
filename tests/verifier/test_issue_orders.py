"""The verifier held to executors that know the semantics alone, on random orders of issue."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random

import pytest

from tests.support.budget import Budget
from tests.support.issue_orders import MUTATIONS, random_issue
from tests.support.issue_ranks import Run, fates, run_all
from tests.support.issue_rules import Creation, Fate, Layout, plan_of, run_plan
from tests.support.ranks import check, run_ranks
from treadle.ir import Schedule
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder
from treadle.verifier.communicator_queues import Judgement, judge, out_of_turn

LAYOUTS: tuple[Layout, ...] = ("channel", "direction", "pair", "pair", "group")
CREATIONS: tuple[Creation, ...] = ("before", "before", "lazy", "lazy-device")
HANGS = {(False, False): "never", (True, False): "large", (True, True): "always"}
"""Whether a step hangs with large and with small messages, in one word."""


@dataclass(frozen=True)
class Case:
    """An order of issue, and what it runs on."""

    schedule: Schedule
    mutations: tuple[str, ...]
    layout: Layout
    creation: Creation

    @classmethod
    def draw(cls, random: Random) -> Case:
        schedule, done = random_issue(random)
        return cls(schedule, tuple(done), random.choice(LAYOUTS), random.choice(CREATIONS))

    def __str__(self) -> str:
        return f"{self.layout}, {self.creation}, {', '.join(self.mutations)}\n{self.schedule}"

    def judged(self) -> Judgement:
        program = lower_cells(self.schedule)
        order = IssueOrder.given(self.schedule, program)
        assert not out_of_turn(program, order), self
        return judge(program, order, self.layout, creation=self.creation)


def agree(case: Case, large: Fate, small: Fate) -> Judgement:
    """Hold the verifier to what became of a step with large and with small messages."""
    judgement = case.judged()
    context = f"{judgement}\nlarge: {large}\nsmall: {small}\n{case}"
    assert judgement.hangs == HANGS[large.hangs, small.hangs], context
    program = lower_cells(case.schedule)
    crossed = {(program.lane_rank[program.lane_of[op]], int(program.mb[op])) for _, op in judgement.crossed}
    seen = {(rank, name.mb) for rank, name, _ in small.crossed}
    assert seen == crossed if not small.hangs else seen <= crossed, context  # what hangs fills some receives only
    assert bool(judgement.circle) == (judgement.hangs != "never"), context
    return judgement


def shown(verdicts: Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in sorted(verdicts.items()))


@pytest.mark.slow
def test_random_orders_are_judged_as_the_text_says(budget: Budget) -> None:
    random, verdicts, done = budget.random(1), Counter[str](), Counter[str]()
    for _ in budget.draws(least=150):
        case = Case.draw(random)
        plan = plan_of(case.schedule, case.layout)
        large, small = (run_plan(plan, eager=eager, creation=case.creation) for eager in (False, True))
        verdicts[agree(case, large, small).word] += 1
        done.update(case.mutations)
    assert {"ends", "hangs", "hangs when large", "crossing"} <= set(verdicts)
    assert set(done) == set(MUTATIONS)
    budget.covered(shown(verdicts))


def on_processes(seed: int, num: int) -> Counter[str]:
    """Run random orders on real processes, each with large and with small messages."""
    random, verdicts = Random(seed), Counter[str]()
    cases: dict[int, list[Case]] = defaultdict(list)
    for _ in range(num):
        case = Case.draw(random)
        cases[case.schedule.pp].append(case)
    for pp, of_size in sorted(cases.items()):
        runs = [
            Run(plan_of(case.schedule, case.layout), eager, case.creation, seed=number)
            for number, case in enumerate(of_size)
            for eager in (False, True)
        ]
        found = iter(fates(runs, check(run_ranks(pp, run_all, runs))))
        for case, large, small in zip(of_size, found, found, strict=True):
            verdicts[agree(case, large, small).word] += 1
    return verdicts


@pytest.mark.slow
@pytest.mark.parametrize("num", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_random_orders_end_or_hang_on_processes_as_judged(num: int, budget: Budget) -> None:
    verdicts = on_processes(seed=num + budget.seed, num=num)
    assert {"ends", "hangs", "hangs when large"} <= set(verdicts)
    budget.covered(shown(verdicts))
