"""Leases: replicas that are lost lapse, the others go on; whoever comes back is filled by its peers, and serves."""

from __future__ import annotations

import signal
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.budget import Budget
from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import DECISIONS, METHODS, PHASES, Crash
from tests.support.update.faults import HANG_S, mixtures
from tests.support.update.fleet import LEASE_S, Fleet, Hand, Step, follow, options
from tests.support.update.models import SourceMaker, expected, model
from tests.support.update.workers import Trouble, Workers
from treadle.host.boot_clock import boot_ns
from treadle.update import ClosedError, Plain, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.protocol.update_messages import Begin, Finish, Grant, Refused, Status, TakePlan
from treadle.update.rank.attempt_run import GONE_S
from treadle.update.worker.gate import Gate
from treadle.update.worker.worker import Worker
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

SECOND = 10**9


# ---- one worker, one log ---------------------------------------------------------------------------------------------


def test_the_gate_looks_at_the_lease_when_a_request_enters_and_before_its_answer_leaves() -> None:
    gate = Gate()
    gate.open(1)
    with gate.serving():
        pass
    gate.lease(boot_ns() - 1)
    assert gate.version is None
    with pytest.raises(ClosedError, match="its lease is over"), gate.serving():
        pytest.fail("a request entered")
    gate.lease(boot_ns() + 1000 * SECOND)
    with pytest.raises(ClosedError, match="its lease is over"), gate.serving():
        gate.lease(boot_ns() - 1)
    assert gate.inside == 0
    gate.lease(None)
    with gate.serving() as version:
        assert version == 1


def granted(epoch: int, version: int, *, term: int = 1, until_ns: int | None = None) -> Grant:
    return Grant(epoch, version, (version,), log="A", term=term, lease_ns=until_ns)


def staged() -> tuple[Worker, Plain]:
    """A worker that has staged version 1 by attempt 1 of log A."""
    plain = Plain({"w": torch.zeros(0)})
    worker = Worker(plain, 0)
    worker.handle(TakePlan("p", (), ()))
    worker.handle(Grant(1, None, (), log="A", term=1))
    worker.handle(Begin(1, 1, "p", "none", "drain", 1.0, partial=False, log="A"))
    worker.handle(Finish(1))
    return worker, plain


def test_a_worker_serves_while_its_lease_lasts_and_again_when_it_is_renewed() -> None:
    worker, plain = staged()
    assert worker.status.staged == 1
    told = worker.handle(granted(1, 1, until_ns=0))
    assert isinstance(told, Status)
    assert (told.state, told.version, plain.gate.version) == ("lapsed", 1, None)
    told = worker.renew(granted(0, 1, until_ns=boot_ns() + 1000 * SECOND))  # between attempts its number is the last's
    assert isinstance(told, Status)
    assert (told.state, plain.gate.version) == ("serving", 1)
    worker.renew(granted(0, 1, until_ns=1))
    assert plain.gate.version == 1, "a grant never shortens a lease"


def test_a_grant_beside_an_attempt_opens_what_is_staged_and_ends_no_attempt() -> None:
    worker, plain = staged()
    late = worker.renew(Grant(0, None, (), log="A", term=1))
    assert isinstance(late, Refused)
    assert (late.code, worker.state) == ("stale", "staged")
    worker.renew(granted(1, 1, term=2))
    assert (worker.state, plain.gate.version) == ("serving", 1)


def test_an_old_term_is_refused() -> None:
    worker, plain = staged()
    worker.handle(granted(1, 1, term=3))
    for refused in (worker.renew(granted(1, 1, term=2)), worker.handle(granted(2, 7, term=2))):
        assert isinstance(refused, Refused)
        assert refused.code == "stale"
        assert "the coordinator of term 2 is over, that of term 3" in refused.text
    assert plain.gate.version == 1


def test_a_later_coordinator_of_a_log_keeps_the_earlier_one_from_writing(tmp_path: Path) -> None:
    directory = tmp_path / "l"
    first = CommitLog(directory)
    first.lead(5 * SECOND)
    first.begin(0)
    first._lock.give_back()  # as where a shared file system loses it
    second = CommitLog(directory)
    second.lead(3 * SECOND)
    assert (second.record.term, second.record.lease_ns) == (2, 3 * SECOND)
    assert (first.is_lost, second.is_lost) == (True, False)
    with pytest.raises(BlockingIOError, match="led by another coordinator, of term 2, this one is of term 1"):
        first.commit(1, 1)
    second.commit(1, second.begin(0))
    second.close()
    third = CommitLog(directory)
    third.lead(SECOND)
    assert (third.record.version, third.record.term, third.record.lease_ns) == (1, 3, 3 * SECOND)
    third.close()


def test_a_coordinator_that_has_not_written_the_log_yet_goes_by_what_the_one_before_writes(tmp_path: Path) -> None:
    """Leases have no end, so nothing is written before the first attempt."""
    first = CommitLog(tmp_path / "l")
    first.lead(None)
    epoch = first.begin(0)
    first._lock.give_back()
    second = CommitLog(tmp_path / "l")
    second.lead(None)
    first.commit(1, epoch)
    assert (second.record.version, second.record.epochs, second.record.id) == (1, (epoch,), first.record.id)
    assert second.record.term == first.record.term + 1
    assert second.begin(epoch) == epoch + 1
    with pytest.raises(BlockingIOError, match="led by another coordinator, of term 2, this one is of term 1"):
        first.commit(2, epoch)
    assert second.record.version == 1
    second.close()


def test_a_policy_takes_leases_that_end() -> None:
    for given in ({"policy": 2}, {"policy": 0, "lease_s": 3.0}):
        with pytest.raises(ValueError, match="leaves replicas out, which takes leases that end"):
            UpdateOptions(**given)
    with pytest.raises(ValueError, match="policy is 'all' or a number of replicas, got 'most'"):
        UpdateOptions(policy="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lease_s is above 0"):
        UpdateOptions(lease_s=0.0)


# ---- a fleet ---------------------------------------------------------------------------------------------------------


@cache
def layout(num: int) -> Holding:
    return Parallel(replicas=num).holding(model(1, 32))


def right(worker: int, version: int) -> str:
    return expected(layout(6), 0, version)


ALL = tuple(range(6))

SCRIPT = (
    Step(version=1),
    Step(("kill 5",), version=2),
    Step(("start 5",), serving=ALL),
    Step(("stopped 4",), version=3),
    Step(("cont 4",), serving=ALL),
    Step(("cut 3",), version=4),
    Step(("mend 3",), serving=ALL),
)


@pytest.mark.slow
def test_a_fleet_of_six_goes_on_without_one_and_takes_it_back() -> None:
    with Workers(layout(6)) as workers, Hand(workers) as hand:
        fleet = Fleet(workers.sockets, workers.ledger, hand.place, SourceMaker(layout(6)), least=5)
        for notes in check(run_ranks(6, follow, fleet, SCRIPT)):
            for step, lost in ((1, 5), (3, 4), (5, 3)):
                assert any(f"worker {lost} is left out" in note for note in notes[step]), notes
        # The coordinator is lost; a host of the fleet is gone for good, though its worker serves until its lease ends.
        for _ in check(run_ranks(5, follow, fleet, (Step(version=5), Step(serving=ALL[:5])))):
            assert [hand.newest[worker] for worker in ALL] == [5, 5, 5, 5, 5, 4]
    assert not mixtures(hand.seen, right), mixtures(hand.seen, right)[:3]
    assert set(hand.closed) == set(ALL), "an update closes each"


def patience(rank: int, fleet: Fleet, versions: int) -> list[float]:
    """How long a rank calls its worker in each of some updates."""
    called: list[float] = []
    with Updater(fleet.sockets, ledger=fleet.ledger, options=options(fleet.least)) as updater:
        worker = updater.context.worker
        connect = worker.connect

        def noted(rank: int, deadline_s: float) -> None:
            called.append(deadline_s)
            connect(rank, deadline_s)

        worker.connect = noted  # type: ignore[method-assign]
        for version in range(1, versions + 1):
            updater.update(fleet.make(rank, version), version)
    return called


@pytest.mark.slow
def test_a_worker_that_is_gone_holds_up_one_update() -> None:
    with Workers(layout(2)) as workers:
        workers.kill(1)
        fleet = Fleet(workers.sockets, workers.ledger, workers.sockets, SourceMaker(layout(2)), least=1)
        assert check(run_ranks(2, patience, fleet, 3)) == [[LEASE_S] * 3, [LEASE_S, GONE_S, GONE_S]]


KINDS = ("kill", "rank", "hang", "decision", "raise", "socket")
LEAST = 4
"""Cases that are drawn at least."""


@pytest.mark.slow
def test_faults_anywhere_under_leases(budget: Budget) -> None:
    """Three replicas of which two are enough: a fault at any place, then new ranks if one was lost."""
    kinds = set()
    with Workers(layout(3)) as workers, Hand(workers, restarts=True) as hand:
        version = 1
        fleet = Fleet(workers.sockets, workers.ledger, hand.place, SourceMaker(layout(3)), least=2, deadline_s=15.0)
        check(run_ranks(3, follow, fleet, (Step(version=1), Step(serving=(0, 1, 2)))))
        for number in budget.draws(LEAST):
            chance, kind = budget.random(number), KINDS[number % len(KINDS)]
            kinds.add(kind)
            for path in hand.place.iterdir():
                path.unlink()
            crash = None
            if kind in ("rank", "decision"):
                rank = 0 if kind == "decision" else chance.randrange(3)
                when = chance.choice(DECISIONS) if kind == "decision" else chance.choice(("before", "after"))
                crash = Crash(rank, when, chance.choice(PHASES))
            else:
                trouble = Trouble(kind, chance.choice(METHODS), hang_s=HANG_S)
                workers.tell(chance.randrange(3), trouble)
            outcomes = run_ranks(3, follow, fleet, (Step(version=version + 1), Step(serving=(0, 1, 2))), crash)
            version += 1
            if crash is None:
                check(outcomes)
            else:
                assert outcomes[crash.rank].exitcode == -signal.SIGKILL, outcomes
                version += 1
                check(run_ranks(3, follow, fleet, (Step(version=version), Step(serving=(0, 1, 2)))))
            assert set(hand.newest.values()) == {version}, (number, kind, hand.newest)
            for path in hand.place.iterdir():
                path.unlink()
        time.sleep(LEASE_S)
        assert all(worker in hand.closed for worker in range(3))
    assert not mixtures(hand.seen, right), mixtures(hand.seen, right)[:3]
    budget.covered(f"{len(kinds)} kinds of faults under leases, {len(hand.seen)} answers")
