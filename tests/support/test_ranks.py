"""The harness that runs ranks: what it tells of each way to end, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.paths import ROOT
from tests.support.patience import SOON_S
from tests.support.ranks import _show_stacks, check, run_ranks


def total(rank: int, scale: float) -> tuple[int, float]:
    given = torch.full((2,), rank * scale)
    dist.all_reduce(given)
    return os.getpid(), float(given[0])


def pass_on(rank: int) -> torch.Tensor:
    """What the rank before sent, as a tensor of its own."""
    world = dist.get_world_size()
    sending = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    got = torch.empty(3)
    dist.recv(got, (rank - 1) % world)
    assert sending is not None
    sending.wait()
    return got


def add_rank(rank: int, given: torch.Tensor) -> list[float]:
    given += rank
    dist.barrier()
    return [float(x) for x in given]


class StageError(RuntimeError):
    def __init__(self, message: str, stage: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.unsendable = lambda: None
        self.large = bytes(1_000_000)


def raise_on_one(rank: int) -> str:
    if rank == 1:
        raise StageError("no such luck", stage=7)
    return f"rank {rank}"


def killed_while_peers_wait(rank: int) -> None:
    if rank == 0:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.empty(1), 0)


def hang_on_two(rank: int) -> int:
    if rank == 2:
        sleep_for_ever()
    return rank


def sleep_for_ever() -> None:
    time.sleep(1000)


def leave_early(rank: int, code: int) -> int:
    os._exit(code)
    return rank


def unsendable(rank: int) -> object:
    return lambda: rank


def test_values_in_the_order_of_ranks() -> None:
    pids, sums = zip(*check(run_ranks(4, total, 0.5)), strict=True)
    assert sums == (3.0, 3.0, 3.0, 3.0)
    assert len({*pids, os.getpid()}) == 5


@pytest.mark.slow
def test_tensors_come_back_from_eight_processes_that_are_gone() -> None:
    got = check(run_ranks(8, pass_on, new=True))
    assert [int(tensor[0]) for tensor in got] == [7, 0, 1, 2, 3, 4, 5, 6]


def test_each_rank_has_its_own_copy_of_a_tensor_it_is_given() -> None:
    given = torch.ones(2)
    assert check(run_ranks(2, add_rank, given)) == [[1.0, 1.0], [2.0, 2.0]]
    assert given.tolist() == [1.0, 1.0]


def test_an_exception_is_told_and_the_other_ranks_are_not_touched() -> None:
    outcomes = run_ranks(3, raise_on_one)
    assert [outcome.exitcode for outcome in outcomes] == [0, 1, 0]
    assert [outcome.value for outcome in outcomes] == ["rank 0", None, "rank 2"]
    error = outcomes[1].error
    assert error is not None
    assert (error.type, error.message, error.attributes) == ("StageError", "no such luck", {"stage": 7})
    assert "in raise_on_one" in error.traceback
    assert "StageError: no such luck" in outcomes[1].stderr
    with pytest.raises(AssertionError, match=r"1 of 3 ranks failed(?s:.)*rank 1 raised(?s:.)*no such luck"):
        check(outcomes)


def test_a_rank_that_kills_itself_and_peers_that_notice() -> None:
    outcomes = run_ranks(3, killed_while_peers_wait)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL, 1, 1]
    assert not any(outcome.timed_out for outcome in outcomes)
    errors = [outcome.error for outcome in outcomes]
    assert errors[0] is None
    assert all(error is not None and "Connection closed by peer" in error.message for error in errors[1:])
    assert all(0 < outcome.ended_s - outcomes[0].ended_s < SOON_S for outcome in outcomes[1:])
    with pytest.raises(AssertionError, match="rank 0 was ended by SIGKILL"):
        check(outcomes)


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_and_shows_where_it_was() -> None:
    begin_s = time.monotonic()
    outcomes = run_ranks(3, hang_on_two, timeout_s=10.0)
    assert time.monotonic() - begin_s < SOON_S
    assert [outcome.timed_out for outcome in outcomes] == [False, False, True]
    assert [outcome.value for outcome in outcomes] == [0, 1, None]
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert "in sleep_for_ever" in outcomes[2].stderr
    with pytest.raises(AssertionError, match="rank 2 did not end in time"):
        check(outcomes)


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_without_a_value_is_no_success(code: int) -> None:
    outcomes = run_ranks(1, leave_early, code)
    assert [outcome.exitcode for outcome in outcomes] == [code]
    with pytest.raises(AssertionError, match=f"rank 0 exited with {code} before its function returned"):
        check(outcomes)


def test_a_value_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    (outcome,) = run_ranks(1, unsendable)
    assert outcome.error is not None
    assert "pickle" in outcome.error.message


@pytest.mark.parametrize("new", [False, True])
def test_an_answer_that_is_read_when_its_process_may_have_ended(new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there at once then: what this process waits for is late, as on a machine with other work."""
    wait = connection.wait

    def late(*args: Any) -> Any:
        time.sleep(0.5)
        return wait(*args)

    monkeypatch.setattr(connection, "wait", late)
    outcomes = run_ranks(2, raise_on_one, new=new)
    assert [(outcome.value, outcome.exitcode) for outcome in outcomes] == [("rank 0", 0), (None, 1)]


SESSION = """
    import os, sys, time
    from pathlib import Path

    from tests.support import rank_pool, ranks

    def report_and_stay(rank: int, directory: Path, stay_s: float) -> None:
        part = directory / f"{rank}.part"
        part.write_text(f"{os.getpid()} {os.getppid()}")
        part.rename(directory / f"{rank}.pids")
        time.sleep(stay_s)

    if __name__ == "__main__":
        rank_pool.PRELOAD[:] = ["torch"]
        ranks.run_ranks(2, report_and_stay, Path(sys.argv[1]), float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["well", "killed"])
def test_nothing_outlives_the_session(end: str, tmp_path: Path) -> None:
    """Neither the ranks nor the forkserver, their parent; not even if the session is killed while ranks run."""
    script = tmp_path / "session.py"
    script.write_text(textwrap.dedent(SESSION))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path), "0" if end == "well" else "1000"]
    with subprocess.Popen(command, env=environment) as session:
        files = [tmp_path / f"{rank}.pids" for rank in range(2)]
        while not all(file.exists() for file in files):
            assert session.poll() in (None, 0)
            time.sleep(0.01)
        if end == "killed":
            session.kill()
        session.wait(SOON_S)
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    assert len(pids) == 3
    deadline_s = time.monotonic() + (0 if end == "well" else SOON_S)
    while (left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left


def test_a_rank_that_ends_while_it_is_asked_for_its_stacks() -> None:
    """The forkserver waits for a rank that has ended, and tells of it after that."""
    ended = subprocess.Popen(["true"])
    ended.wait(SOON_S)
    reading, writing = os.pipe()
    os.close(writing)
    process: Any = SimpleNamespace(pid=ended.pid, is_alive=lambda: True, sentinel=reading)
    _show_stacks([process])
    os.close(reading)
