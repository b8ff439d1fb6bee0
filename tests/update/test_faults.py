"""Faults in the middle of updates: no mixture is served, every survivor hears who failed, and the next try succeeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.support.budget import Budget
from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import KINDS, Crash, Flip
from tests.support.update.faults import HANG_S, Case, draw, fresh, play, shared_memory
from tests.support.update.models import SourceMaker, expected, model
from tests.support.update.workers import Trouble, Workers
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

WORLD = 3
NUM_BUCKETS = 6
LEAST = 12
"""Cases that are drawn at least: every kind of fault, and all that take no time a second time at another place."""


@cache
def layouts() -> tuple[Holding, Holding]:
    tensors = model(3, 64)
    owner = lambda name: 0 if name == "embed" else int(name.split(".")[1])  # noqa: E731
    return Parallel(pp=3, stage=owner).holding(tensors), Parallel(tp=3, dim=lambda name: 0).holding(tensors)


@cache
def right(worker: int, version: int) -> str:
    return expected(layouts()[1], worker, version)


class Served:
    """A set of workers that lives through many faults, and the version that it serves."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.version = workers, 1
        self.make = SourceMaker(layouts()[0])
        check(run_ranks(WORLD, fresh, (workers.sockets, workers.ledger), self.make, 1, Case(-1)))

    def play(self, case: Case) -> None:
        self.version = play(self.workers, case, self.version, self.make, right)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    before = shared_memory()
    with Workers(layouts()[1]) as workers:
        yield Served(workers)
    assert shared_memory() <= before


def test_faults_anywhere(served: Served, budget: Budget) -> None:
    assert len(KINDS) <= LEAST
    for number in budget.draws(LEAST):
        served.play(draw(number + budget.seed * len(KINDS), WORLD, NUM_BUCKETS))
    budget.covered(f"{len(KINDS)} kinds of faults")


NAMED: dict[str, Callable[[], Case]] = {
    "worker raises": lambda: Case(1, worker=1, trouble=Trouble("raise", "load", 2)),
    "worker killed": lambda: Case(2, worker=2, trouble=Trouble("kill", "load", 1)),
    "worker killed when prepared": lambda: Case(3, worker=1, trouble=Trouble("kill", "open")),
    "worker hangs": lambda: Case(4, worker=0, trouble=Trouble("hang", "load", 1, hang_s=HANG_S)),
    "worker loses its socket": lambda: Case(5, worker=2, trouble=Trouble("socket", "load", 3)),
    "rank killed": lambda: Case(6, crash=Crash(2, "bucket", bucket=3)),
    "rank killed after its vote": lambda: Case(7, crash=Crash(1, "after", "finish")),
    "coordinator killed": lambda: Case(8, crash=Crash(0, "bucket", bucket=2)),
    "coordinator killed before it decides": lambda: Case(9, crash=Crash(0, "before commit")),
    "coordinator killed after it decided": lambda: Case(10, crash=Crash(0, "after commit")),
    "coordinator killed while it tells": lambda: Case(11, crash=Crash(0, "amid telling")),
    "a byte changes": lambda: Case(12, flip=Flip(1, 3)),
}


@pytest.mark.parametrize("name", NAMED)
def test_fault(name: str, served: Served) -> None:
    served.play(NAMED[name]())
