"""Error texts about keys, names, logs and processes that are wrong."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import model, source_of
from tests.support.update.passing import await_stopped, expire
from tests.support.update.workers import Workers
from treadle.host.processes import stopped
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog, peek
from treadle.update.protocol.record import MOST
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding, Tensor
from treadle.weights.update_plan import plan_update

pytestmark = pytest.mark.slow

SMALL = Memory(1 << 18, target_bytes=1 << 14, least_bytes=1 << 12)
OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)

Do = Callable[[Updater, int], Any]


def layouts() -> tuple[Holding, Holding]:
    tensors = model(1, 32)
    return Parallel(replicas=2).holding(tensors), Parallel(tp=2, dim=lambda name: 0).holding(tensors)


def run(workers: Workers, do: Do, options: UpdateOptions = OPTIONS) -> list[Any]:
    return check(run_ranks(2, _run, (workers.sockets, workers.ledger), do, options))


def _run(rank: int, places: tuple[Path, Path], do: Do, options: UpdateOptions) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank)


def error_of(do: Callable[[], Any]) -> str:
    try:
        do()
    except UpdateError as error:
        return str(error)
    return ""


# ---- names -----------------------------------------------------------------------------------------------------------


def misnamed(updater: Updater, rank: int) -> list[str]:
    have, _ = layouts()
    source = source_of(have, rank, 1)
    other = {f"model.{name}" if "layers" in name else name: name for name in source.tensors}
    state = {theirs: next(t for p, t in source.held.items() if p.tensor == ours) for theirs, ours in other.items()}
    told = [error_of(lambda: updater.update(Source.of(state), 1))]
    updater.update(source, 1)
    told.append(error_of(lambda: updater.update(source, 2, changed=["layers.0.upp"], base=1)))
    unwanted = Source.of({**{p.tensor: t for p, t in source.held.items()}, "tied": torch.ones(2)})
    return [*told, error_of(lambda: updater.update(unwanted, 2, changed=["tied"], base=1))]


def test_tensors_that_nobody_has_are_named_with_near_ones_and_who_wants_them() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        for missing, unknown, unwanted in run(workers, misnamed):
            assert missing.startswith("the update ranks, in phase plan of attempt 1: workers 0, 1 want 5 tensors that")
            assert "'layers.0.norm' (near: 'model.layers.0.norm')" in missing
            assert " and 1 more; give a source with all that workers want" in missing
            assert unknown.startswith("the caller, in phase plan")
            assert "changed= names 'layers.0.upp', a tensor that no rank has and no worker wants" in unknown
            assert "(near: 'layers.0.up'); leave it out" in unknown
            assert "changed= names 'tied', which no worker wants; name the tensor it is tied to" in unwanted


def test_who_wants_what_no_rank_has() -> None:
    tensor = Tensor("w", (8, 4), "float32")
    half, whole = (Parallel(tp=2, dim=lambda name: 0).holding([tensor]), Parallel(replicas=2).holding([tensor]))
    part = Holding(half.tensors, (half.pieces[0],))
    with pytest.raises(ValueError, match=r"no rank has \[4:8, 0:4\] of it; workers 0, 1 want it; add a rank"):
        plan_update(part, whole, SMALL)
    with pytest.raises(ValueError, match="workers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more want a tensor that no rank has"):
        plan_update(Holding({}, ((),)), Parallel(replicas=20).holding([tensor]), SMALL)


def shapes_differ(updater: Updater, rank: int) -> str:
    have, _ = layouts()
    held = {p.tensor: t for p, t in source_of(have, rank, 1).held.items()}
    held["layers.0.norm"] = held["layers.0.norm"] if rank == 0 else torch.ones(7)
    return error_of(lambda: updater.update(Source.of(held), 1))


def test_a_tensor_that_two_ranks_describe_differently_is_told_in_words() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        for told in run(workers, shapes_differ):
            assert told.startswith("update rank 1, in phase plan")
            assert "layers.0.norm is float32 (7,) there and bfloat16 (32,) on a rank before it" in told


def recovered(updater: Updater, rank: int) -> list[str]:
    with pytest.raises(ValueError, match=r"recover\(source, version=7\) from a source that has it; got a version and"):
        updater.recover(version=3)
    with pytest.raises(ValueError, match=rf"version is a whole number from 1 to {MOST}, got int {2**64}"):
        updater.update(Source.of({}), 2**64)
    return [error_of(updater.recover)]


def first(updater: Updater, rank: int) -> int:
    return updater.update(source_of(layouts()[0], rank, 1), 1).version


def test_recovering_without_a_replica_names_the_call_that_would_do_it() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        assert run(workers, first) == [1, 1]
        workers.restart(1)
        for (told,) in run(workers, recovered):
            assert "the workers that serve version 1 do not have all of it: call recover(source, version=1)" in told
        workers.restart(0)
        for (told,) in run(workers, recovered):
            assert "every copy of version 1 is lost" in told
            assert "until recover(source, version=1) is called with a source that still has it" in told


# ---- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b'{"version": 36893488147419103232}',
        b'{"version": 1, "epochs": [9223372036854775808]}',
        b'{"\xff": 1}',
        b"\xff\xfe",
    ],
)
def test_a_log_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    directory = tmp_path / "l"
    directory.mkdir(mode=0o700)
    (directory / "ledger.json").write_bytes(content)
    for read in (peek, CommitLog):
        with pytest.raises(
            ValueError, match=r"l/ledger.json is not a ledger \(.*an empty directory and take the workers over"
        ):
            read(directory)


@pytest.mark.parametrize("counted", [b"\xff\xfe", b"9" * 40, b"9" * 5000, b"seven"])
def test_a_torn_count_of_attempts_does_not_matter(tmp_path: Path, counted: bytes) -> None:
    directory = tmp_path / "l"
    directory.mkdir(mode=0o700)
    (directory / "attempts").write_bytes(counted)
    ledger = CommitLog(directory)
    assert ledger.begin(4) == 5
    ledger.close()


@pytest.mark.parametrize("name", ["attempts", "ledger.part"])
def test_a_full_disk_is_told_with_its_path(tmp_path: Path, name: str) -> None:
    ledger = CommitLog(tmp_path / "l")
    (tmp_path / "l" / name).symlink_to("/dev/full")
    write = (lambda: ledger.begin(1)) if name == "attempts" else (lambda: ledger.commit(1, 1))
    with pytest.raises(OSError, match=rf"No space left on device; make room there.*: '.*/l/{name}'") as told:
        write()
    assert told.value.errno == errno.ENOSPC
    ledger.close()


def test_a_log_that_others_can_reach_is_not_about_sockets(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir(mode=0o755)
    (tmp_path / "l").chmod(0o755)
    with pytest.raises(
        PermissionError, match=r"mode 0755; others could read or replace the decisions in it; chmod 700"
    ):
        CommitLog(tmp_path / "l")


# ---- processes that say nothing --------------------------------------------------------------------------------------


def twice(updater: Updater, rank: int) -> str:
    updater.update(source_of(layouts()[0], rank, 1), 1)
    Path(updater.context.worker.path.parent.parent / f"first {rank}").touch()
    while not (updater.context.worker.path.parent.parent / "stopped").exists():
        time.sleep(0.02)
    be_impatient(updater, rank)
    return error_of(lambda: updater.update(source_of(layouts()[0], rank, 2), 2))


def be_impatient(updater: Updater, rank: int) -> None:
    """The rank whose worker is stopped waits a second for it; all others keep a deadline of minutes."""
    if rank == 1:
        updater.options = replace(updater.options, deadline_s=1)


def stop_worker(workers: Workers, worker: int) -> None:
    """Once the first update is done."""
    while not all((workers.directory / f"first {rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    pid = workers.processes[worker].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    while not stopped(pid):
        time.sleep(0.01)
    (workers.directory / "stopped").touch()


@pytest.mark.parametrize("again", [False, True])
def test_a_stopped_worker_is_called_stopped(again: bool) -> None:
    """On a connection that was there, and on a new one."""
    _, want = layouts()
    with Workers(want) as workers:
        pid = workers.processes[1].pid
        assert pid is not None
        if again:
            for flag in ("first 0", "first 1"):
                (workers.directory / flag).touch()
            stop_worker(workers, 1)
        else:
            threading.Thread(target=stop_worker, args=(workers, 1), daemon=True).start()
        told = run(workers, impatient if again else twice)
        for text in told:
            assert text.startswith("worker 1"), text
            assert (
                f"(process {pid} is stopped, by SIGSTOP or from a terminal; let it go on with: kill -CONT {pid})"
                in text
            )
            assert "short of cores" not in text
        os.kill(pid, signal.SIGCONT)


def first_or_error(updater: Updater, rank: int) -> str:
    return error_of(lambda: updater.update(source_of(layouts()[0], rank, 1), 1))


def impatient(updater: Updater, rank: int) -> str:
    be_impatient(updater, rank)
    return first_or_error(updater, rank)


def rank_that_stops(updater: Updater, rank: int) -> str:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        await_stopped(pids[1])
        expire(updater, 1)
    return first_or_error(updater, rank)


def test_a_stopped_rank_is_called_stopped() -> None:
    """It joins, and is stopped before it enters."""
    _, want = layouts()
    with Workers(want) as workers:
        outcomes = run_ranks(2, _run, (workers.sockets, workers.ledger), rank_that_stops, OPTIONS, stuck=[1])
        told = outcomes[0].value
        assert told is not None, outcomes
        assert told.startswith("update rank 1")
        assert f"not heard of within {OPTIONS.phase_s:g} s of the others (process " in told
        assert "is stopped, by SIGSTOP or from a terminal; let it go on with: kill -CONT" in told


def test_a_process_that_runs_is_not_called_stopped() -> None:
    assert stopped(os.getpid()) == ""
    assert stopped(0) == ""
    assert stopped(2**22 + 1) == "", "there is no such process"
