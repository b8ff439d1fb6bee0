"""Grids of cases of which the tests run a part: one in which every pair of values occurs.

    @pytest.mark.parametrize(("schedule", "dtype", "saved"), pairs(SCHEDULES, DTYPES, ("leave", "offload")))

Of the cases of a grid, those that together have every pair of values of every two axes are in `pytest -m all`; the rest
are marked `nightly`. Which are chosen depends on a seed and on nothing else, and ids of tests print them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

Case = tuple[Any, ...]


def pairs(*axes: Iterable[Any], seed: int = 0, keep: Callable[..., bool] = lambda *case: True) -> list[Any]:
    """The whole grid as parameters, all but a part with every pair of values marked `nightly`; `keep` has the cases."""
    values = [list(axis) for axis in axes]
    numbers = [n for n in product(*map(range, map(len, values))) if keep(*_case(values, n))]
    first = list(covering(numbers, seed))
    chosen = set(first)
    rest = [number for number in numbers if number not in chosen]
    return [pytest.param(*_case(values, number)) for number in first] + [
        pytest.param(*_case(values, number), marks=pytest.mark.nightly) for number in rest
    ]


def covering(cases: Collection[Case], seed: int = 0) -> Iterator[Case]:
    """Some of these cases, which have every pair of values that all of them have; the most new ones first."""
    shuffled = list(cases)
    Random(seed).shuffle(shuffled)
    of = {case: set(_pairs(case)) for case in shuffled}
    missing = set[tuple[int, Any, int, Any]]().union(*of.values())
    while missing:
        best = max(shuffled, key=lambda case: len(of[case] & missing))
        missing -= of[best]
        yield best


def _pairs(case: Case) -> Iterator[tuple[int, Any, int, Any]]:
    if len(case) == 1:
        yield 0, case[0], 0, case[0]
    for (i, a), (j, b) in combinations(enumerate(case), 2):
        yield i, a, j, b


def _case(values: Sequence[Sequence[Any]], number: Case) -> Case:
    return tuple(axis[at] for axis, at in zip(values, number, strict=True))
