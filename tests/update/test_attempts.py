"""Attempts that go wrong between ranks: decisions that come late, ranks that are late or stopped, full disks."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import Flip, arm
from tests.support.update.models import Compare, model, source_of
from tests.support.update.passing import await_stopped, expire, go_on, in_vain
from tests.support.update.workers import Asker, Trouble, Workers
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.update.protocol.control import FromCoordinator, Phase
from treadle.update.protocol.update_messages import MOST_PLANS, Status
from treadle.update.rank import attempt_run
from treadle.update.rank.attempt_run import AttemptRun
from treadle.update.rank.broadcast import Buckets
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

SMALL = Memory(1 << 18, target_bytes=1 << 14, least_bytes=1 << 12)
OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
IMPATIENT = UpdateOptions(SMALL, deadline_s=3.0, drain_s=0.5)


def layouts() -> tuple[Holding, Holding]:
    tensors = model(2, 32)
    return Parallel(replicas=2).holding(tensors), Parallel(tp=2, dim=lambda name: 0).holding(tensors)


Do = Callable[[Updater, int, Holding], Any]


def run(workers: Workers, do: Do, options: UpdateOptions = OPTIONS) -> list[Any]:
    """`do` on both ranks."""
    have, _ = layouts()
    return check(run_ranks(2, _run, (workers.sockets, workers.ledger), have, do, options))


def _run(rank: int, places: tuple[Path, Path], have: Holding, do: Do, options: UpdateOptions) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank, have)


def tried(updater: Updater, rank: int, have: Holding, version: int, **only: Any) -> str:
    """The error of an update, nothing if there is none."""
    try:
        updater.update(source_of(have, rank, version), version, **only)
    except UpdateError as error:
        return str(error)
    return ""


def status(sockets: Path, worker: int) -> Status:
    asker = Asker(sockets, worker)
    try:
        return asker.status()
    finally:
        asker.close()


# ---- the decision ----------------------------------------------------------------------------------------------------


def stall_decision(updater: Updater) -> None:
    """Stops rank 0 in the middle of its next decision, until another rank lets it go on."""
    if updater.coordinator is None:
        return
    ledger = updater.coordinator.ledger
    commit = ledger.commit

    def slow(version: int, epoch: int) -> None:
        ledger.commit = commit  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)
        commit(version, epoch)

    ledger.commit = slow  # type: ignore[method-assign]


def gives_up(updater: Updater, pid: int) -> None:
    """Has a rank give up its next wait for a decision, when the process that decides has stopped."""
    client = updater.context.coordinator
    hear = client.hear

    def late(kinds: tuple[type[Any], ...], phase: Phase) -> FromCoordinator:
        if phase != "finish":
            return hear(kinds, phase)
        client.hear = hear  # type: ignore[method-assign]
        await_stopped(pid)
        with in_vain():
            return hear(kinds, phase)

    client.hear = late  # type: ignore[method-assign]


def stalled(updater: Updater, rank: int, have: Holding, sockets: Path) -> tuple[str, list[Status], str]:
    """What is told of version 2, whose decision comes late; workers' status then; what is told of version 3."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    assert not tried(updater, rank, have, 1)
    stall_decision(updater)
    if rank:
        gives_up(updater, pids[0])
    told = tried(updater, rank, have, 2)
    if rank:
        go_on(pids[0])
    dist.barrier()  # the coordinator has decided
    between = [status(sockets, worker) for worker in range(2)]
    dist.barrier()
    return told, between, tried(updater, rank, have, 3)


def test_a_worker_that_has_voted_waits_for_a_decision_however_late() -> None:
    """Rank 0 is stopped in the middle of deciding for longer than rank 1 waits; then it commits."""
    _, want = layouts()
    with Workers(want) as workers:
        first, second = run(workers, partial(stalled, sockets=workers.sockets))
        assert "whether version 2 is committed is not known here, and the worker stays closed" in second[0]
        for _, (committed, unheard), _ in (first, second):
            assert (committed.state, committed.version) == ("serving", 2)
            assert unheard.state == "staged", "it served or went back without having been told"
        assert first[2] == second[2] == ""
        for worker in range(2):
            assert (status(workers.sockets, worker).state, status(workers.sockets, worker).version) == ("serving", 3)


# ---- blame -----------------------------------------------------------------------------------------------------------


def before_bucket(updater: Updater, number: int, act: Callable[[], None]) -> None:
    """Has a rank do something between two buckets, once."""
    done = iter(range(1, 1 << 30))
    updater.context.progress = lambda size, total: act() if next(done) == number else None


def stop() -> None:
    """Stops this process, as a host that is overloaded or being moved does."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)


def stopped_in_a_bucket(updater: Updater, rank: int, have: Holding) -> str:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        before_bucket(updater, 2, stop)
    told = tried(updater, rank, have, 1)
    if rank == 0:
        go_on(pids[1])
    return told


def test_a_rank_that_is_stopped_is_named_not_the_one_that_waits() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        told, _ = run(workers, stopped_in_a_bucket, IMPATIENT)
        assert told.startswith("update rank 1 (process "), told
        assert ": says nothing" in told
        assert "; update rank 0 waited for it" in told
        assert "in phase load, bucket" in told


def hears_late(updater: Updater, rank: int, have: Holding) -> UpdateError:
    """Rank 1 looks at why it failed only when the coordinator has told it, and left."""
    arm(updater, None, Flip(0, 1), Path("no mark"))
    explain = AttemptRun.explain

    def late(self: AttemptRun, error: BaseException) -> UpdateError:
        until = time.monotonic() + SOON_S
        while rank == 1 and not self.coordinator.lost and time.monotonic() < until:
            time.sleep(0.01)
        return explain(self, error)

    try:
        with patch.object(AttemptRun, "explain", late):
            updater.update(source_of(have, rank, 1), 1)
    except UpdateError as error:
        return error
    raise AssertionError("a byte has changed on its way")


def test_what_the_coordinator_said_before_it_left_is_what_counts() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        first, second = (error.fault for error in run(workers, hears_late))
        assert first.corrupt
        assert first == second


# ---- what a failed attempt leaves ------------------------------------------------------------------------------------


def comes_late(updater: Updater, rank: int, have: Holding) -> list[str]:
    told = [tried(updater, rank, have, 1)]
    if rank == 0:
        expire(updater, 1)
        told.append(tried(updater, rank, have, 2))
    while rank == 1 and updater.context.coordinator.told is None:
        time.sleep(0.02)  # until it hears of the end of an attempt that it never entered
    dist.barrier()
    return [*told, tried(updater, rank, have, 2)]


def test_a_rank_that_came_too_late_is_in_the_next_attempt() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        first, second = run(workers, comes_late)
        assert "update rank 1" in first[1]
        assert "not heard of" in first[1]
        assert first[-1] == second[-1] == ""
        assert workers.tell(0, Compare(2)) == workers.tell(1, Compare(2)) == []


def recovers_twice(rank: int, places: tuple[Path, Path], have: Holding, mark: Path) -> tuple[int, int]:
    """Once where nothing is to do, once after the test has started worker 1 again."""
    with Updater(places[0], ledger=places[1], options=OPTIONS) as updater:
        nothing = updater.recover().size_bytes
        mark.touch()
        while not mark.with_suffix(".done").exists():
            time.sleep(0.02)
        return nothing, updater.recover().size_bytes


def first_version(updater: Updater, rank: int, have: Holding) -> str:
    return tried(updater, rank, have, 1)


def test_recovering_where_nothing_is_to_do_does_not_spoil_later_ones(tmp_path: Path) -> None:
    want, _ = layouts()  # both have all of it
    mark = tmp_path / "mark"
    with Workers(want) as workers:
        run(workers, first_version)

        def restart() -> None:
            while not mark.exists():
                time.sleep(0.02)
            workers.restart(1)
            mark.with_suffix(".done").touch()

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        moved = check(run_ranks(2, recovers_twice, (workers.sockets, workers.ledger), want, mark))
        thread.join()
        assert all(nothing == 0 < some for nothing, some in moved)
        assert workers.tell(1, Compare(1)) == []


def many_plans(updater: Updater, rank: int, have: Holding) -> list[str]:
    told = [tried(updater, rank, have, 1)]
    names = sorted(have.tensors)[: MOST_PLANS + 1]
    for version, name in enumerate(names, 2):
        told.append(tried(updater, rank, have, version, changed=[name], base=version - 1))
    return [*told, tried(updater, rank, have, len(names) + 2)]


def test_a_plan_that_was_forgotten_is_told_again() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        for told in run(workers, many_plans):
            assert told == [""] * (MOST_PLANS + 3)


def full_disk(updater: Updater, rank: int, have: Holding) -> list[str]:
    told = [tried(updater, rank, have, 1)]
    if updater.coordinator is not None:
        ledger = updater.coordinator.ledger
        ledger.commit, before = no_space, ledger.commit  # type: ignore[method-assign]
    told.append(tried(updater, rank, have, 2))
    dist.barrier()
    if updater.coordinator is not None:
        ledger.commit = before  # type: ignore[method-assign]
    dist.barrier()
    told.append(tried(updater, rank, have, 2))
    updater.close()
    return told


def no_space(version: int, epoch: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_decision_that_cannot_be_written_is_none_and_the_next_one_may() -> None:
    """Closing twice does no harm, too."""
    _, want = layouts()
    with Workers(want) as workers:
        for told in run(workers, full_disk):
            assert "the coordinator (update rank 0), in phase finish" in told[1]
            assert "No space left on device" in told[1]
            assert told[2] == ""
        assert workers.tell(0, Compare(2)) == workers.tell(1, Compare(2)) == []


def traces(updater: Updater, rank: int, have: Holding) -> tuple[str, int]:
    done = updater.update(source_of(have, rank, 1), 1)
    told = tried(updater, rank, have, 1)
    time.sleep(0.2 * rank)
    return told, updater.trace(done).program.num_ranks


def test_a_trace_can_be_had_after_a_later_attempt_failed() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        for told, num_ranks in run(workers, traces):
            assert "version 1 is not newer than 1" in told
            assert num_ranks == 2


def answers_late(updater: Updater, rank: int, have: Holding) -> list[str]:
    worker = updater.context.worker
    ask = worker.layout

    def late(number: int, deadline_s: float) -> Any:
        worker.layout = ask  # type: ignore[method-assign]
        with in_vain():
            return ask(number, deadline_s)

    if rank:
        worker.layout = late  # type: ignore[method-assign]
    told = [tried(updater, rank, have, 1)]
    dist.barrier()
    return [*told, tried(updater, rank, have, 1)]


def test_an_answer_that_comes_too_late_is_not_taken_for_another() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        workers.tell(1, Trouble("hang", "layout", hang_s=1))
        for late, again in run(workers, answers_late):
            assert "worker 1" in late
            assert "no answer within" in late
            assert again == ""


def meets_a_hang(updater: Updater, rank: int, have: Holding) -> tuple[str, float]:
    began = time.monotonic()
    with patch.object(attempt_run, "FAREWELL_S", PATIENT_S):  # so long that to wait for it shows
        return tried(updater, rank, have, 1), time.monotonic() - began


def test_a_worker_that_hangs_is_waited_for_once() -> None:
    """It is waited for until the deadline, and not again for its farewell: it goes back when its connection ends."""
    _, want = layouts()
    with Workers(want) as workers:
        workers.tell(1, Trouble("hang", "load", 1, hang_s=2 * PATIENT_S))
        for told, seconds in run(workers, meets_a_hang, IMPATIENT):
            assert "worker 1" in told
            assert IMPATIENT.deadline_s <= seconds < IMPATIENT.deadline_s + SOON_S


def two_sets(rank: int, one: tuple[Path, Path], other: tuple[Path, Path], have: Holding) -> list[str]:
    make = Buckets.__init__

    def late(self: Buckets, *args: Any) -> None:
        time.sleep(0.3 * (1 - rank))
        make(self, *args)

    with (
        patch.object(Buckets, "__init__", late),
        Updater(one[0], ledger=one[1], options=OPTIONS) as first,
        Updater(other[0], ledger=other[1], options=OPTIONS) as second,
    ):
        return [tried(first, rank, have, 1), tried(second, rank, have, 1), tried(first, rank, have, 2)]


def test_the_same_ranks_update_two_sets_of_workers() -> None:
    have, want = layouts()
    with Workers(want) as one, Workers(want) as other:
        places = (one.sockets, one.ledger), (other.sockets, other.ledger)
        assert check(run_ranks(2, two_sets, *places, have)) == [["", "", ""]] * 2
        assert one.tell(1, Compare(2)) == other.tell(1, Compare(1)) == []


def interrupt() -> None:
    raise KeyboardInterrupt


def breaks_off(updater: Updater, rank: int, have: Holding) -> tuple[str, str]:
    if rank == 1:
        before_bucket(updater, 2, interrupt)
    try:
        told = tried(updater, rank, have, 1)
    except KeyboardInterrupt:
        told = "interrupted"
    dist.barrier()
    return told, tried(updater, rank, have, 1)


def test_a_rank_that_is_interrupted_tells_the_others() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        first, second = run(workers, breaks_off)
        assert "update rank 1" in first[0]
        assert "KeyboardInterrupt" in first[0]
        assert second[0] == "interrupted"
        assert first[1] == second[1] == ""
