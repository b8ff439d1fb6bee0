"""The version served: after recovery from peers, losses, partial updates, old messages, and restarts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import check, run_ranks
from tests.support.update.faults import Watcher, mixtures
from tests.support.update.models import SMALL, Compare, expected, model, source_of
from tests.support.update.passing import expire
from tests.support.update.workers import Asker, Trouble, Troubled, Workers, ask_once
from treadle.update import Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.protocol.update_messages import (
    Answer,
    Begin,
    Finish,
    Grant,
    Refused,
    Rollback,
    Status,
    TakePlan,
)
from treadle.update.worker.worker import Worker
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)


def layouts() -> tuple[Holding, Holding]:
    """Two pipeline stages, each on two ranks, into two replicas of TP2."""
    tensors = model(2, 64)
    owner = lambda name: 0 if name == "embed" else int(name.split(".")[1])  # noqa: E731
    have = Parallel(pp=2, replicas=2, stage=owner).holding(tensors)
    return have, Parallel(tp=2, replicas=2, dim=lambda name: 0).holding(tensors)


def run(
    workers: Workers, have: Holding, do: Callable[[Updater, int, Holding], Any], *, options: UpdateOptions = OPTIONS
) -> list[Any]:
    """`do` on all ranks."""
    return check(run_ranks(4, _run, (workers.sockets, workers.ledger), have, do, options))


def _run(rank: int, places: tuple[Path, Path], have: Holding, do: Any, options: UpdateOptions) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank, have)


def first(updater: Updater, rank: int, have: Holding) -> int:
    return updater.update(source_of(have, rank, 1), 1).version


def recover(updater: Updater, rank: int, have: Holding) -> tuple[int, int]:
    done = updater.recover()
    return done.version, done.size_bytes


def recover_or_error(updater: Updater, rank: int, have: Holding) -> str:
    try:
        updater.recover()
    except UpdateError as error:
        return str(error)
    return ""


def recover_from_source(updater: Updater, rank: int, have: Holding) -> int:
    return updater.recover(source_of(have, rank, 1), 1).version


def test_a_restarted_worker_gets_the_version_from_its_peers_while_they_serve() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        run(workers, have, first)
        workers.restart(3)
        refused = ask_once(workers.sockets, 3)
        assert isinstance(refused, Refused)
        assert refused.code == "closed"
        with Watcher(workers) as watcher:
            done = run(workers, have, recover)
        assert {version for version, _ in done} == {1}
        half = sum(piece.box.num_elements * 2 for piece in want.pieces[3])
        assert all(half <= moved < 2 * half for _, moved in done)  # what the lost worker wants, and no more
        assert workers.tell(3, Compare(1)) == []
        answer = ask_once(workers.sockets, 3)
        assert isinstance(answer, Answer)
        assert answer.version == 1
        right = lambda worker, version: expected(want, worker, version)  # noqa: E731
        assert not mixtures(watcher.seen, right)
        assert {seen.worker for seen in watcher.seen} >= {0, 1, 2}
        assert set(watcher.closed) <= {3}, "a peer stopped serving"


def test_where_no_peer_has_it_the_trainer_may() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        run(workers, have, first)
        workers.restart(1)
        workers.restart(3)  # both that hold the second half
        told = run(workers, have, recover_or_error)
        assert all("no rank has" in text for text in told), told
        assert set(run(workers, have, recover_from_source)) == {1}
        assert all(workers.tell(worker, Compare(1)) == [] for worker in range(4))


def test_when_every_copy_is_lost_all_stay_closed_and_it_says_so() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        run(workers, have, first)
        for worker in range(4):
            workers.restart(worker)
        told = run(workers, have, recover_or_error)
        assert all("every copy of version 1 is lost" in text for text in told), told
        assert all(isinstance(ask_once(workers.sockets, worker), Refused) for worker in range(4))


def only_changes(updater: Updater, rank: int, have: Holding) -> list[tuple[int, tuple[str, ...]]]:
    whole = updater.update(source_of(have, rank, 1), 1)
    new, old = source_of(have, rank, 2), source_of(have, rank, 1)
    mixed = {p: new.held[p] if p.tensor == "layers.1.up" else old.held[p] for p in new.held}
    changes = Source(have.tensors, mixed)
    part = updater.update(changes, 2, changed=["layers.1.up"], base=1)
    other = updater.update(changes, 3, changed=["layers.1.up"], base=1)  # version 2 is served by now: all move
    return [(done.size_bytes, done.notes) for done in (whole, part, other)]


def test_only_what_changed_moves_where_the_base_is_served() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        for whole, part, other in run(workers, have, only_changes):
            assert part[0] < whole[0] / 4
            assert other[0] == whole[0]
            assert any("against version 1, 2 is served" in note for note in other[1])
        for worker in range(4):
            assert set(workers.tell(worker, Compare(1))) == {"layers.1.up"}
            assert "layers.1.up" not in workers.tell(worker, Compare(2))


def silence(adapter: Troubled) -> None:
    """Make an engine like vLLM: it cannot export, and needs whole pieces."""
    adapter.can_export, adapter.whole = False, True


def answer_of(workers: Workers, worker: int) -> Answer:
    """What a worker answers once it is back, which takes a moment after an attempt that failed."""
    until = time.monotonic() + 10
    while not isinstance(answer := ask_once(workers.sockets, worker), Answer):
        assert time.monotonic() < until, answer
        time.sleep(0.05)
    return answer


def changes_and_faults(updater: Updater, rank: int, have: Holding) -> tuple[tuple[str, ...], str]:
    updater.update(source_of(have, rank, 1), 1)
    notes = updater.update(source_of(have, rank, 2), 2, changed=["layers.1.up"], base=1).notes
    try:
        updater.update(Source(have.tensors, {}), 3)
    except UpdateError as error:
        return notes, str(error)
    return notes, ""


def third_or_error(updater: Updater, rank: int, have: Holding) -> str:
    try:
        updater.update(source_of(have, rank, 3), 3)
    except UpdateError as error:
        return str(error)
    return ""


def recover_second(updater: Updater, rank: int, have: Holding) -> int:
    return updater.recover(source_of(have, rank, 2), 2).version


@pytest.mark.parametrize("rollback", ["host", "disk"])
def test_engines_that_cannot_hand_out_what_they_hold(rollback: Rollback) -> None:
    have, want = layouts()
    options = replace(OPTIONS, rollback=rollback)
    with Workers(want) as workers:
        for worker in range(4):
            workers.tell(worker, silence)
        for notes, told in run(workers, have, changes_and_faults, options=options):
            assert any("the engines of workers 0, 1, 2, 3 take all or none" in note for note in notes)
            assert "no rank has" in told
        assert all(workers.tell(worker, Compare(2)) == [] for worker in range(4))

        workers.tell(2, Trouble("raise", "finish"))  # all others have loaded everything by then, and go back
        assert all("trouble in finish" in told for told in run(workers, have, third_or_error, options=options))
        for worker in range(4):
            assert answer_of(workers, worker).version == 2
            assert workers.tell(worker, Compare(2)) == []

        workers.restart(3)
        workers.tell(3, silence)
        for told in run(workers, have, recover_or_error, options=options):
            assert "workers 0, 1, 2 serve version 2 and their engines cannot hand it out" in told
        assert set(run(workers, have, recover_second, options=options)) == {2}
        assert workers.tell(3, Compare(2)) == []


def stale_versions(updater: Updater, rank: int, have: Holding) -> list[str]:
    updater.update(source_of(have, rank, 1), 5)
    told = []
    for version in (5, 4):
        with pytest.raises(UpdateError) as caught:
            updater.update(source_of(have, rank, 1), version)
        told.append(str(caught.value))
    with pytest.raises(UpdateError) as caught:
        updater.update(source_of(have, rank, 1), 6 + rank)
    return [*told, str(caught.value)]


def test_ranks_ask_for_one_new_version() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        for same, older, apart in run(workers, have, stale_versions):
            assert "version 5 is not newer than 5" in same
            assert "version 4 is not newer than 5" in older
            assert "all ranks must ask for the same" in apart


def stopped_rank(updater: Updater, rank: int, have: Holding) -> str:
    updater.update(source_of(have, rank, 1), 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    expire(updater, 3)
    with pytest.raises(UpdateError) as caught:
        updater.update(source_of(have, rank, 2), 2)
    return caught.value.who


def test_a_rank_that_hangs_is_named_by_the_deadline() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        places = workers.sockets, workers.ledger
        outcomes = run_ranks(4, _run, places, have, stopped_rank, OPTIONS, stuck=[2], timeout_s=SOON_S)
        assert [outcome.value for outcome in outcomes if outcome.rank != 2] == ["update rank 2"] * 3, outcomes
        assert {answer.version for answer in map(asked(workers), range(4))} == {1}


def asked(workers: Workers) -> Callable[[int], Any]:
    return lambda worker: ask_once(workers.sockets, worker)


def too_much(updater: Updater, rank: int, have: Holding) -> str:
    updater.options = replace(updater.options, rollback="host")
    updater.update(source_of(have, rank, 1), 1)
    with pytest.raises(UpdateError) as caught:
        updater.update(source_of(have, rank, 2), 2)
    return str(caught.value)


def no_room(adapter: Any) -> None:
    from treadle.update.worker import rollback_store

    vars(rollback_store)["available_bytes"] = lambda: 10  # what the machine would say


def test_a_way_back_that_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        workers.tell(2, no_room)
        told = run(workers, have, too_much)
        assert all(
            "worker 2" in text and "more bytes of host memory until commit, 10 are free" in text for text in told
        )
        assert all(workers.tell(worker, Compare(1)) == [] for worker in range(4))
        asker = Asker(workers.sockets, 2)
        assert asker.status().rollbacks == 0
        asker.close()


# ---- one worker, message by message ----------------------------------------------------------------------------------


def lone() -> tuple[Worker, Plain, TakePlan]:
    plain = Plain({"w": torch.zeros(0)})
    worker, plan = Worker(plain, 0), TakePlan("p", (), ())
    worker.handle(plan)
    return worker, plain, plan


def begin(epoch: int, version: int) -> Begin:
    return Begin(epoch, version, "p", "none", "drain", 1.0, partial=False)


def test_messages_of_an_older_attempt_are_refused() -> None:
    worker, _, _ = lone()
    worker.handle(begin(5, 1))
    for message in (begin(4, 1), Finish(4), Grant(4, None, ()), Grant(4, 1, (4,))):
        answer = worker.handle(message)
        assert isinstance(answer, Refused)
        assert answer.code == "stale", message


def test_a_prepared_worker_stays_closed_until_it_learns_the_decision() -> None:
    worker, plain, _ = lone()
    worker.handle(begin(5, 1))
    worker.handle(Finish(5))
    worker.release()
    assert worker.state == "staged"
    assert plain.gate.version is None
    answer = worker.handle(begin(6, 2))  # nor does a new attempt let it forget
    assert isinstance(answer, Refused)
    assert answer.code == "order"
    committed = worker.handle(Grant(6, 1, (5,)))
    assert isinstance(committed, Status)
    assert (committed.state, committed.version) == ("serving", 1)
    with plain.serving() as version:
        assert version == 1


def test_a_version_of_the_same_number_by_another_attempt_is_not_the_same() -> None:
    worker, plain, _ = lone()
    worker.handle(begin(5, 1))
    worker.handle(Finish(5))
    gone_back = worker.handle(Grant(7, 1, (6,)))  # attempt 6 committed a version 1, this worker holds that of 5
    assert isinstance(gone_back, Status)
    assert (gone_back.state, gone_back.version, plain.gate.version) == ("lapsed", None, None)


def test_steps_may_come_again() -> None:
    worker, plain, _ = lone()
    for message in (begin(5, 1), Finish(5), Grant(5, 1, (5,))):
        answers = [worker.handle(message) for _ in range(2)]
        once, again = (msgspec.structs.replace(answer, stamp_ns=0) for answer in answers if isinstance(answer, Status))
        assert once == again
    assert plain.gate.version == 1


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_a_decision_is_there_for_the_next_process(tmp_path: Path) -> None:
    ledger = CommitLog(tmp_path / "l")
    epoch = ledger.begin(7)
    ledger.commit(3, epoch)
    ledger.close()
    again = CommitLog(tmp_path / "l")
    assert (again.record.version, again.record.epochs, again.begin(0)) == (3, (8,), 9)
    again.commit(3, 9)
    assert again.record.epochs == (8, 9)
    again.close()


def hold_ledger(rank: int, directory: Path) -> str:
    if rank == 0:
        ledger = CommitLog(directory)
        torch.distributed.barrier()
        torch.distributed.barrier()
        ledger.close()
        return ""
    torch.distributed.barrier()
    try:
        CommitLog(directory)
        told = ""
    except OSError as error:
        told = str(error)
    torch.distributed.barrier()
    return told


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    assert "another coordinator holds the ledger" in check(run_ranks(2, hold_ledger, tmp_path / "l"))[1]


def test_a_torn_ledger_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir(mode=0o700)
    (tmp_path / "l" / "ledger.json").write_text('{"version": 3, "epo')
    with pytest.raises(ValueError, match="is not a ledger"):
        CommitLog(tmp_path / "l")
