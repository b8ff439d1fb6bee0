"""Grids, budgets and CPU seconds: what tests that draw or choose rest on."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.budget import Budget
from tests.support.cpu_time import tree_seconds
from tests.support.grid import covering, pairs

AXES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(AXES, st.integers(0, 9))
def test_every_pair_of_values_occurs_in_few_cases(sizes: list[int], seed: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = list(covering(cases, seed))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in chosen} == set(product(range(sizes[i]), range(sizes[j])))
    assert len(set(chosen)) == len(chosen) <= len(cases)
    assert chosen == list(covering(cases, seed))


def test_the_rest_of_a_grid_is_for_the_night() -> None:
    made = pairs("abc", (1, 2, 3), (True, False, None), keep=lambda letter, number, flag: (letter, number) != ("a", 1))
    assert len(made) == 27 - 3
    asleep = [bool(case.marks) for case in made]
    assert asleep == sorted(asleep)
    assert 9 <= asleep.count(False) <= 13
    assert {case.values[:2] for case in made if not case.marks} == set(product("abc", (1, 2, 3))) - {("a", 1)}


def test_a_budget_has_its_least_draws_and_ten_times_as_many_at_night() -> None:
    assert len(list(Budget(1.0).draws(least=7))) == 7
    assert len(list(Budget(10.0).draws(least=7))) == 70


def test_a_budget_goes_on_while_cpu_is_left() -> None:
    budget = Budget(1.0)
    number = sum(bool(sum(range(100_000 + draw))) for draw in budget.draws(least=1, cpu_s=0.1))
    assert number > 1
    budget.covered("sums")
    assert budget.told[0].startswith(f"sums: {number} draws, ")


BUSY = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass"


def test_the_seconds_of_children_count_while_they_run_and_after() -> None:
    before = tree_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", f"{BUSY}\nprint(1, flush=True)\ninput()"], stdin=-1, stdout=-1
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = tree_seconds(os.getpid())
        child.communicate(b"\n")
    assert running - before > 0.15  # of 0.2, in ticks
    assert tree_seconds(os.getpid()) >= running
