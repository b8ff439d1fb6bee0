"""Ranks, workers and logs that are not the ones an update takes them for are refused, and what is served stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import Compare, model, source_of
from tests.support.update.workers import Asker, Workers
from treadle.update import Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog, peek
from treadle.update.protocol.update_messages import (
    Answer,
    Begin,
    Finish,
    Grant,
    Refused,
    Status,
    TakePlan,
)
from treadle.update.worker.endpoint import worker_path
from treadle.update.worker.slot import Slot
from treadle.update.worker.worker import Worker
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

SMALL = Memory(1 << 18, target_bytes=1 << 14, least_bytes=1 << 12)
OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)

Do = Callable[[Updater, int, Holding], Any]


def whole(num: int) -> Holding:
    """Every rank has all of it, and every worker wants that."""
    return Parallel(replicas=num).holding(model(1, 32))


def run(workers: Workers, world: int, do: Do, ledger: Path | None = None, **named: Any) -> list[Any]:
    """`do` on so many ranks, with the workers' own log or another; `named` goes to the updater."""
    places = workers.sockets, ledger if ledger is not None else workers.ledger
    return check(run_ranks(world, _run, places, whole(world), do, named))


def _run(rank: int, places: tuple[Path, Path], have: Holding, do: Do, named: dict[str, Any]) -> Any:
    with Updater(places[0], ledger=places[1], options=OPTIONS, **named) as updater:
        return do(updater, rank, have)


def error_of(call: Callable[[], Any]) -> str:
    """The text of an UpdateError, nothing if there is none."""
    try:
        call()
    except UpdateError as error:
        return str(error)
    return ""


def first(updater: Updater, rank: int, have: Holding) -> str:
    return error_of(lambda: updater.update(source_of(have, rank, 1), 1))


def second(updater: Updater, rank: int, have: Holding) -> str:
    return error_of(lambda: updater.update(source_of(have, rank, 2), 2))


def first_of_another(updater: Updater, rank: int, have: Holding) -> str:
    """Also called version 1, with other weights."""
    return error_of(lambda: updater.update(source_of(have, rank, 11), 1))


def recovers(updater: Updater, rank: int, have: Holding) -> tuple[str, int]:
    """The error, or how many bytes moved."""
    try:
        return "", updater.recover().size_bytes
    except UpdateError as error:
        return str(error), -1


def served(workers: Workers) -> list[int | None]:
    """What each worker answers with; None where it is closed."""
    versions: list[int | None] = []
    for worker in range(len(workers.want.pieces)):
        asker = Asker(workers.sockets, worker)
        answer = asker.ask()
        versions.append(answer.version if isinstance(answer, Answer) else None)
        asker.close()
    return versions


# ---- members ---------------------------------------------------------------------------------------------------------


def test_fewer_ranks_than_workers_are_refused_and_the_missing_worker_is_named() -> None:
    with Workers(whole(3)) as workers:
        assert run(workers, 3, first) == [""] * 3
        for told in run(workers, 2, second):
            assert f"worker 2 (process {workers.processes[2].pid}" in told, told
            assert "takeover=True" in told
        assert served(workers) == [1, 1, 1]


def test_a_set_that_shrank_is_taken_over_once_the_others_have_ended() -> None:
    with Workers(whole(3)) as workers:
        run(workers, 3, first)
        workers.kill(2)
        assert run(workers, 2, second, takeover=True) == ["", ""]
        assert run(workers, 2, recovers) == [("", 0)] * 2, "the smaller set is the log's from then on"
        workers.start(2)
        workers.await_up(2)
        assert served(workers) == [2, 2, None]


# ---- incarnations ----------------------------------------------------------------------------------------------------


class Replaced:
    """Worker 1's socket is unlinked and another process started in its place; the old one lives, and is asked."""

    def __init__(self, workers: Workers) -> None:
        self.asker = Asker(workers.sockets, 1)
        self.process, self._pipe = workers.processes[1], workers.pipes[1]
        worker_path(workers.sockets, 1).unlink()
        workers.start(1)
        workers.await_up(1)

    def end(self) -> None:
        self.asker.close()
        self.process.kill()
        self.process.join()
        self._pipe.close()


def test_a_worker_that_was_replaced_closes_before_another_version_is_served() -> None:
    with Workers(whole(2)) as workers:
        run(workers, 2, first)
        old = Replaced(workers)
        try:
            assert run(workers, 2, second) == ["", ""]
            answer = old.asker.ask()
            assert isinstance(answer, Refused), f"{answer.version} is served by the old process, 2 is committed"
            assert served(workers) == [2, 2]
        finally:
            old.end()


class Waits:
    """Updates, says so, waits for the test, and recovers."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, updater: Updater, rank: int, have: Holding) -> tuple[str, int]:
        first(updater, rank, have)
        (self.mark / f"{rank}").touch()
        while not (self.mark / "go").exists():
            time.sleep(0.02)
        return recovers(updater, rank, have)


def test_ranks_that_were_there_before_find_the_worker_that_is_there_now(tmp_path: Path) -> None:
    with Workers(whole(2)) as workers:
        olds: list[Replaced] = []

        def replace() -> None:
            while not all((tmp_path / str(rank)).exists() for rank in range(2)):
                time.sleep(0.02)
            olds.append(Replaced(workers))
            (tmp_path / "go").touch()

        thread = threading.Thread(target=replace, daemon=True)
        thread.start()
        told = run(workers, 2, Waits(tmp_path))
        thread.join()
        try:
            assert all(error == "" and moved > 0 for error, moved in told), told
            assert served(workers) == [1, 1]
            assert workers.tell(1, Compare(1)) == []
            assert isinstance(olds[0].asker.ask(), Refused)
        finally:
            olds[0].end()


def test_a_worker_that_was_replaced_and_cannot_close_is_named_and_nothing_is_updated() -> None:
    """The old process is stopped: whether it will go on to serve, nobody knows."""
    with Workers(whole(2)) as workers:
        run(workers, 2, first)
        pid = workers.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        old = None
        try:
            process, pipe = workers.processes[1], workers.pipes[1]
            worker_path(workers.sockets, 1).unlink()
            workers.start(1)
            workers.await_up(1)
            quick = UpdateOptions(SMALL, deadline_s=3, drain_s=1)
            places = workers.sockets, workers.ledger
            for told in check(run_ranks(2, _run_with, places, whole(2), second, quick)):
                assert f"process {pid}" in told, told
                assert "end it" in told
            assert served(workers) == [1, None]
            old = process, pipe
        finally:
            os.kill(pid, signal.SIGCONT)
            if old is not None:
                run_after = run(workers, 2, second)
                old[0].kill()
                old[0].join()
                old[1].close()
                assert run_after == ["", ""]
        assert served(workers) == [2, 2]


def _run_with(rank: int, places: tuple[Path, Path], have: Holding, do: Do, options: UpdateOptions) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank, have)


def fork_child(engine: Any) -> int:
    """In a worker's process: a child that lives on, as of a pool of processes."""
    child = os.fork()
    if not child:
        time.sleep(PATIENT_S)
        os._exit(0)
    return child


def test_a_worker_that_was_killed_is_started_again_though_its_child_lives() -> None:
    with Workers(whole(2)) as workers:
        run(workers, 2, first)
        child = workers.tell(1, fork_child)
        try:
            workers.restart(1)
            assert all(told == "" and moved > 0 for told, moved in run(workers, 2, recovers))
            assert served(workers) == [1, 1]
        finally:
            os.kill(child, signal.SIGKILL)


# ---- logs ------------------------------------------------------------------------------------------------------------


def part_of_another(updater: Updater, rank: int, have: Holding) -> str:
    changed = [sorted(have.tensors)[0]]
    return error_of(lambda: updater.update(source_of(have, rank, 12), 2, changed=changed, base=1))


def test_another_runs_log_is_refused_though_it_has_the_same_version() -> None:
    """And the changes against that version do not become part of what is served."""
    with Workers(whole(2)) as one, Workers(whole(2)) as other:
        assert run(one, 2, first) == run(other, 2, first_of_another) == [""] * 2
        for told, _ in run(one, 2, recovers, other.ledger):
            assert "another log" in told, told
            assert "takeover" in told
        assert all("another log" in told for told in run(one, 2, part_of_another, other.ledger))
        assert served(one) == [1, 1]
        assert one.tell(0, Compare(1)) == one.tell(1, Compare(1)) == []


def two_logs(rank: int, sockets: Path, logs: tuple[Path, Path], key: Path, have: Holding) -> list[str]:
    one = Updater(sockets, ledger=logs[0], key=key, options=OPTIONS)
    other = Updater(sockets, ledger=logs[1], key=key, options=OPTIONS)
    with one, other:
        return [
            first(one, rank, have),
            error_of(lambda: other.update(source_of(have, rank, 5), 5)),
            second(one, rank, have),
        ]


def test_a_second_coordinator_with_a_log_of_its_own_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    with Workers(whole(2)) as workers:
        logs = workers.ledger, workers.directory / "other"
        for mine, others, again in check(run_ranks(2, two_logs, workers.sockets, logs, key, whole(2))):
            assert mine == again == ""
            assert "another log" in others, others
        assert served(workers) == [2, 2]


def nothing_to_send(updater: Updater, rank: int, have: Holding) -> str:
    """Refused in the plan: no rank has what workers want."""
    return error_of(lambda: updater.update(Source(have.tensors, {}), 2))


def test_a_wrong_log_closes_nothing() -> None:
    with Workers(whole(2)) as workers:
        run(workers, 2, first)
        assert all(run(workers, 2, nothing_to_send, workers.directory / "wrong"))
        assert run(workers, 2, recovers) == [("", 0)] * 2, "with the right log nothing has to move"
        assert served(workers) == [1, 1]
        assert workers.tell(0, Compare(1)) == workers.tell(1, Compare(1)) == []


def test_a_log_that_took_over_in_vain_leaves_what_its_own_log_opens_again() -> None:
    """It has a version of its own, so the workers were closed for it; they kept what they had."""
    with Workers(whole(2)) as workers, Workers(whole(2)) as other:
        assert run(workers, 2, first) == run(other, 2, first_of_another) == [""] * 2
        assert all("no rank has" in told for told in run(workers, 2, nothing_to_send, other.ledger, takeover=True))
        assert served(workers) == [None, None]
        assert run(workers, 2, recovers) == [("", 0)] * 2, "with the right log nothing has to move"
        assert served(workers) == [1, 1]
        assert workers.tell(0, Compare(1)) == workers.tell(1, Compare(1)) == []


def test_a_log_that_is_lost_is_replaced_by_one_that_takes_over() -> None:
    """What workers serve is what is committed then: they go on serving, and the old log is refused."""
    with Workers(whole(2)) as workers:
        run(workers, 2, first)
        new = workers.directory / "new"
        assert run(workers, 2, recovers, new, takeover=True) == [("", 0)] * 2
        assert served(workers) == [1, 1]
        assert run(workers, 2, second, new) == ["", ""]
        assert all("another log" in told for told in run(workers, 2, second))
        assert served(workers) == [2, 2]


def updates_to(version: int, weights: int, updater: Updater, rank: int, have: Holding) -> str:
    return error_of(lambda: updater.update(source_of(have, rank, weights), version))


def test_a_log_that_was_put_back_from_a_backup_is_refused_and_its_workers_go_on() -> None:
    """It is the workers' own log, of which they have a later version."""
    with Workers(whole(2)) as workers:
        log, kept, newest = workers.ledger, workers.directory / "kept", workers.directory / "newest"
        run(workers, 2, first)
        shutil.copytree(log, kept)
        assert run(workers, 2, partial(updates_to, 2, 2)) == run(workers, 2, partial(updates_to, 3, 3)) == ["", ""]
        log.rename(newest)
        kept.rename(log)
        asked: tuple[dict[str, Any], ...] = ({}, {"takeover": True})
        for named in asked:
            for told in run(workers, 2, partial(updates_to, 2, 12), **named):
                assert (
                    "workers 0, 1, in phase enter of attempt 0: worker 0 has version 3, committed by attempt 3" in told
                )
                assert f"the log in {log} ends with attempt 1: it is an older copy" in told
                assert "an empty directory (takeover=True, --takeover)" in told
            assert all("it is an older copy" in told for told, _ in run(workers, 2, recovers, **named))
            assert served(workers) == [3, 3]
        workers.restart(1)
        assert all("workers 0, in phase enter" in told for told, _ in run(workers, 2, recovers)), "one is enough"
        assert served(workers) == [3, None]
        assert all(told == "" and moved > 0 for told, moved in run(workers, 2, recovers, newest))
        assert run(workers, 2, recovers, workers.directory / "empty", takeover=True) == [("", 0)] * 2
        assert served(workers) == [3, 3]
        assert workers.tell(0, Compare(3)) == workers.tell(1, Compare(3)) == []


# ---- one worker and one log, without processes -----------------------------------------------------------------------


def lone() -> tuple[Worker, Plain]:
    """A worker that serves version 1 of log A by attempt 1."""
    plain = Plain({"w": torch.zeros(0)})
    made = Worker(plain, 0)
    made.handle(TakePlan("p", (), ()))
    made.handle(Grant(1, None, (), log="A"))
    made.handle(Begin(1, 1, "p", "none", "drain", 1.0, partial=False, log="A"))
    made.handle(Finish(1))
    assert isinstance(made.handle(Grant(1, 1, (1,), log="A")), Status)
    return made, plain


def test_a_worker_refuses_another_log_and_names_both() -> None:
    made, plain = lone()
    told = made.handle(Grant(9, 1, (1,), log="B"))
    assert isinstance(told, Refused)
    assert (told.code, plain.gate.version) == ("foreign", 1)
    assert all(part in told.text for part in ("another log, A", "this one is B", "takeover=True"))
    assert made.status.epoch == 1, "what was refused leaves no trace"


def test_a_worker_that_has_voted_belongs_to_the_log_it_voted_for() -> None:
    made, _ = lone()
    made.handle(Grant(2, None, (), log="B", takeover=True))
    made.handle(Begin(2, 5, "p", "none", "drain", 1.0, partial=False, log="B"))
    made.handle(Finish(2))
    told = made.handle(Grant(3, 1, (1,), log="A"))
    assert isinstance(told, Refused)
    assert told.code == "foreign"
    assert made.status.log == "B"


def test_a_closed_worker_keeps_what_it_has_for_its_own_log_only() -> None:
    made, plain = lone()
    closed = made.handle(Grant(2, 1, (1,), log="B", takeover=True))  # the same numbers, another log
    assert isinstance(closed, Status)
    assert (closed.state, closed.version, closed.log, plain.gate.version) == ("lapsed", 1, "A", None)
    opened = made.handle(Grant(3, 1, (1,), log="A"))
    assert isinstance(opened, Status)
    assert (opened.state, plain.gate.version) == ("serving", 1)


def test_a_closed_worker_does_not_open_when_an_attempt_fails() -> None:
    made, plain = lone()
    made.handle(Grant(2, None, (), log="B", takeover=True))
    made.handle(Begin(2, 5, "p", "host", "drain", 1.0, partial=False, log="B"))
    made.handle(Grant(2, None, (), log="B", takeover=True))
    assert (made.state, plain.gate.version) == ("lapsed", None)
    made.handle(Grant(3, 1, (1,), log="A"))
    assert plain.gate.version == 1


def test_a_log_of_before_there_were_ids_gets_one_with_the_next_attempt(tmp_path: Path) -> None:
    directory = tmp_path / "l"
    directory.mkdir(mode=0o700)
    (directory / "ledger.json").write_text('{"version":3,"epochs":[5]}')
    ledger = CommitLog(directory)
    assert (ledger.record.version, ledger.record.epochs, ledger.record.members) == (3, (5,), ())
    assert peek(directory).id == ""
    ledger.begin(0)
    ledger.close()
    assert peek(directory).id == ledger.record.id != ""
    again = CommitLog(directory)
    assert again.record == ledger.record
    again.close()


def test_one_process_at_a_time_has_a_slot(tmp_path: Path) -> None:
    """A second endpoint of the same process takes it from the first; the id stays the file's."""
    one = Slot(tmp_path / "worker-0.slot")
    held = one.held, one.id
    two = Slot(tmp_path / "worker-0.slot")
    assert held == (True, two.id)
    assert two.held
    assert not one.take()
    path = tmp_path / "worker-0.slot"
    assert check(run_ranks(1, look_at_slot, path)) == [(False, os.getpid())]
    two.give_back()
    assert check(run_ranks(1, look_at_slot, path)) == [(True, 0)]


def look_at_slot(rank: int, path: Path) -> tuple[bool, int]:
    """Whether another process gets it, and who has it."""
    slot = Slot(path)
    seen = slot.held, slot.holder()
    slot.give_back()
    return seen


def test_a_slot_that_is_taken_from_a_thread_that_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint's thread tries to take its slot while another endpoint of the process takes the file."""
    one = Slot(tmp_path / "worker-0.slot")
    one.held = False  # as where another process had it
    begun, lockf, found = threading.Event(), fcntl.lockf, []

    def late(fd: int, kind: int) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(0.2)  # whoever does not wait has the file by now
            assert one._fd == fd
        lockf(fd, kind)

    monkeypatch.setattr(fcntl, "lockf", late)
    looks = threading.Thread(target=lambda: found.append((one.take(), one.holder())))
    looks.start()
    assert begun.wait(PATIENT_S)
    two = Slot(tmp_path / "worker-0.slot")
    looks.join(PATIENT_S)
    assert [taken for taken, _ in found] == [True]
    assert (one.held, two.held) == (False, True)
    two.give_back()
    assert (one.holder(), two.holder()) == (0, 0)
