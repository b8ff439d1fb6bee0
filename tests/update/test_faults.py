"""Faults in the middle of updates: no mixture is served, every survivor hears who failed, and the next try succeeds.

TREADLE_UPDATE_FAULTS says how many cases are played; they are the same for the same number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import pytest

from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import Crash, Flip
from tests.support.update.faults import HANG_S, Case, draw, fresh, play, shared_memory
from tests.support.update.models import SourceMaker, expected, model
from tests.support.update.workers import Trouble, Workers
from treadle.weights.layouts import Parallel
from treadle.weights.pieces import Holding

pytestmark = pytest.mark.slow

NUM_CASES = int(os.environ.get("TREADLE_UPDATE_FAULTS", "24"))
BATCH = 8
WORLD = 3
NUM_BUCKETS = 6


@cache
def layouts() -> tuple[Holding, Holding]:
    tensors = model(3, 64)
    owner = lambda name: 0 if name == "embed" else int(name.split(".")[1])  # noqa: E731
    return Parallel(pp=3, stage=owner).holding(tensors), Parallel(tp=3, dim=lambda name: 0).holding(tensors)


@cache
def right(worker: int, version: int) -> str:
    return expected(layouts()[1], worker, version)


def start(workers: Workers, make: SourceMaker) -> None:
    check(run_ranks(WORLD, fresh, (workers.sockets, workers.ledger), make, 1, Case(-1)))


def play_all(cases: list[Case]) -> None:
    have, want = layouts()
    make, before = SourceMaker(have), shared_memory()
    with Workers(want) as workers:
        start(workers, make)
        version = 1
        for case in cases:
            version = play(workers, case, version, make, right)
    assert shared_memory() <= before


@pytest.mark.parametrize("first", range(0, NUM_CASES, BATCH))
def test_faults_anywhere(first: int) -> None:
    play_all([draw(number, WORLD, NUM_BUCKETS) for number in range(first, min(first + BATCH, NUM_CASES))])


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
def test_fault(name: str) -> None:
    play_all([NAMED[name]()])
