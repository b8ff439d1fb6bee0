"""Campaigns of random faults: a few draws of each, and whether watchers find what they look for."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.patience import PATIENT_S
from tests.support.update.campaign import CAMPAIGNS, run
from tests.support.update.log_watch import LogWatcher, Watched
from tests.support.update.models import model
from tests.support.update.workers import Troubled, Workers, zeros
from treadle.update.adapters.plain import digest_of
from treadle.update.coordinator.commit_log import CommitLog
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

DRAWS = {"targeted": 2, "deltas": 1, "leases": 18, "agents": 20}
"""The first of two draws that take no time: ranks and workers that end, and those that are gone for good."""


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_draws_of_a_campaign_are_clean(name: str) -> None:
    tally = run(name, 2, DRAWS[name], print)
    assert tally.is_clean, tally
    assert tally.draws == 2
    assert tally.answers > 0


def digest_of_zeros(want: Holding, worker: int, version: int) -> str:
    return digest_of(zeros(want, worker).held)


def serve(version: int, adapter: Troubled) -> None:
    adapter.open(version)


def spoil(adapter: Troubled) -> None:
    next(iter(adapter.held.values())).view(-1)[0] = 1.0


def commit(ledger: Path, version: int) -> None:
    log = CommitLog(ledger)
    log.commit(version, log.begin(0))
    log.close()


def test_a_watcher_finds_versions_that_are_not_the_committed_one_and_mixtures() -> None:
    want = Parallel().holding(model(1, 8))
    with Workers(want) as workers:
        watcher = LogWatcher(workers.sockets, workers.ledger, 0, partial(digest_of_zeros, want))
        try:

            def seen_after(version: int, committed: int) -> Watched:
                commit(workers.ledger, committed)
                workers.tell(0, partial(serve, version))
                watcher.ask()
                watcher.report()
                until = time.monotonic() + PATIENT_S
                while time.monotonic() < until:
                    watcher.ask()
                    seen = watcher.report()
                    if seen.answers[version] > 1:
                        return seen
                raise AssertionError("no answer came")

            assert not seen_after(2, 2).wrong
            assert "serves 3, committed were 2 before and 2 after" in seen_after(3, 2).wrong[-1]
            assert "serves 2, committed were 4 before and 4 after" in seen_after(2, 4).wrong[-1]
            workers.tell(0, spoil)
            assert "a mixture" in seen_after(4, 4).wrong[-1]
        finally:
            watcher.close()
